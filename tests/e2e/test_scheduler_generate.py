"""Generate over real ports: a scheduler, a worker, and a model that repeats its prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from tests.e2e.scheduler_stack import Stack, Worker, one_worker, until

Pair = tuple[Stack, Worker]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    async with one_worker() as pair:
        yield pair


async def test_generate_text_streams_accepted_deltas_and_finished(pair: Pair) -> None:
    stack, worker = pair
    output = await stack.generate(text="Grüße, 世界! 🎉", return_token_ids=True)
    assert output.accepted is not None
    assert output.accepted.prompt_tokens == len("Grüße, 世界! 🎉".encode())
    assert output.text[0] == "Grüße, 世界! 🎉"
    finished = output.finished[0]
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert finished.stop_token_id == 2
    assert finished.usage.completion_tokens == output.accepted.prompt_tokens + 1
    assert len(output.token_ids[0]) == finished.usage.completion_tokens
    assert finished.seed == output.accepted.seed
    assert finished.timings.total_ms >= finished.timings.ttft_ms > 0
    await until(worker.is_empty)
    assert "".join(output.deltas) == output.text[0]


async def test_generate_several_choices_share_the_prompt(pair: Pair) -> None:
    stack, _ = pair
    text = "a prompt of more than one block of tokens"
    output = await stack.generate(text=text, sampling={"n": 3})
    assert output.text == {0: text, 1: text, 2: text}
    assert set(output.finished) == {0, 1, 2}
    assert output.finished[1].usage.cached_tokens == len(text) // 16 * 16


async def test_generate_stops_at_a_stop_string_and_never_shows_it(pair: Pair) -> None:
    stack, worker = pair
    output = await stack.generate(
        text="one two three four", sampling={"stop": ["three", "tw3"]}, return_token_ids=True
    )
    assert output.text[0] == "one two "
    finished = output.finished[0]
    assert (finished.reason, finished.stop) == (common_pb2.FINISH_REASON_STOP, "three")
    assert finished.usage.completion_tokens == len("one two three") == len(output.token_ids[0])
    await until(worker.is_empty)


async def test_generate_held_back_text_is_shown_at_the_end(pair: Pair) -> None:
    stack, _ = pair
    output = await stack.generate(text="one thr", sampling={"stop": ["three"]})
    assert output.text[0] == "one thr"
    assert output.finished[0].WhichOneof("stopped_by") == "stop_token_id"


async def test_generate_length_cuts_inside_a_character_as_the_tokenizer_decodes_it(pair: Pair) -> None:
    stack, _ = pair
    output = await stack.generate(text="ab🎉cd", sampling={"max_tokens": 4})
    assert output.text[0] == "ab\ufffd"
    assert output.finished[0].reason == common_pb2.FINISH_REASON_LENGTH


async def test_generate_stop_token_is_no_text(pair: Pair) -> None:
    stack, _ = pair
    tokens = (await stack.generation.Tokenize(pb.TokenizeRequest(text="abc"))).token_ids
    output = await stack.generate(text="abc", sampling={"stop_token_ids": [tokens[1]]})
    assert output.text[0] == "a"
    assert output.finished[0].stop_token_id == tokens[1]


async def test_generate_chat_uses_the_models_template(pair: Pair) -> None:
    stack, _ = pair
    messages = [{"role": "user", "content": "hello"}]
    output = await stack.generate(chat={"messages": messages}, keep_special_tokens=True)
    assert output.text[0].startswith("<|im_start|>user\nhello")


async def test_generate_token_ids_in_and_no_text_out(pair: Pair) -> None:
    stack, _ = pair
    output = await stack.generate(tokens={"ids": [40, 50, 60]}, skip_text=True, return_token_ids=True)
    assert output.token_ids[0] == [40, 50, 60, 2]
    assert output.text[0] == ""


async def test_generate_logprobs_come_with_their_tokens(pair: Pair) -> None:
    stack, _ = pair
    output = await stack.generate(text="abc", sampling={"logprobs": 1}, return_token_ids=True)
    assert [entry.token_id for entry in output.logprobs[0]] == output.token_ids[0]


async def test_generate_without_max_tokens_takes_what_the_context_leaves(pair: Pair) -> None:
    stack, _ = pair
    output = await stack.generate(text="x" * 1000, sampling={"ignore_eos": True})
    assert output.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
    assert output.finished[0].usage.completion_tokens == 24


@pytest.mark.parametrize("cut", [1, 7, 9, 13])
async def test_resume_continues_and_shows_nothing_twice(pair: Pair, cut: int) -> None:
    stack, _ = pair
    text = "héllo 🎉 there"
    whole = await stack.generate(text=text, return_token_ids=True)
    tokens = whole.token_ids[0][:cut]
    shown = bytes(b for b in text.encode()[:cut]).decode(errors="ignore")
    resume = [{"choice": 0, "token_ids": tokens, "shown_bytes": len(shown.encode())}]
    rest = await stack.generate(text=text, resume=resume, return_token_ids=True)
    assert shown + rest.text[0] == text
    assert tokens + rest.token_ids[0] == whole.token_ids[0]
    assert rest.finished[0].usage.completion_tokens == len(whole.token_ids[0])


async def test_resume_of_a_complete_choice_ends_as_it_had_ended(pair: Pair) -> None:
    stack, worker = pair
    whole = await stack.generate(text="one two three", sampling={"stop": ["two"]}, return_token_ids=True)
    resume = [{"choice": 0, "token_ids": whole.token_ids[0], "shown_bytes": 2}]
    again = await stack.generate(text="one two three", sampling={"stop": ["two"]}, resume=resume)
    assert again.text[0] == "e "
    assert again.finished[0].stop == "two"
    ended = [{"choice": 0, "token_ids": [40, 2], "shown_bytes": 1}]
    again = await stack.generate(tokens={"ids": [40]}, resume=ended)
    assert again.finished[0].reason == common_pb2.FINISH_REASON_STOP
    await until(worker.is_empty)
