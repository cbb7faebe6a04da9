"""Tokenizing in child processes: right, bounded in time, and not brought down by any one input."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import resource
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from octavo.protocol.keys import chain
from octavo.service import event_loop
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.errors import ServiceError
from scheduler_svc.text.tokenization import (
    Decode,
    EncodeChat,
    Encoded,
    EncodeText,
    Job,
    KeySpec,
    TakeTokens,
    TextSpec,
)
from scheduler_svc.text.tokenizer_child import HEADER
from scheduler_svc.text.tokenizer_pool import TokenizerPool, _Child
from worker_svc.runner.sim import byte_level_tokenizer

SPEC = TextSpec(
    model="m",
    tokenizer_json=byte_level_tokenizer().encode(),
    chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{% if spin %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
    special_tokens={},
    bos_token_id=None,
    vocab_size=259,
)
KEYS = KeySpec(b"root", 16)
CONTEXT = 4096
LOOPS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {
    "services": event_loop.run,
    "standard": asyncio.run,
}


def on_each_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """Run a test on the event loop of the services, and on the standard one: pipes fail differently."""

    @pytest.mark.parametrize("loop", LOOPS)
    def run(loop: str) -> None:
        LOOPS[loop](test())

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def length(pool: TokenizerPool, text: str, model: str = "m") -> int:
    """How many tokens the pool makes of a text."""
    return len(ids_of(await pool.encode(EncodeText(model, CONTEXT, text), len(text))))


@asynccontextmanager
async def running(timeout_s: float, *, load: bool = True) -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(size=2, timeout_s=timeout_s)
    pool.start()
    try:
        if load:
            await pool.load(SPEC)
        yield pool
    finally:
        await pool.close()


@pytest.fixture
async def pool() -> AsyncIterator[TokenizerPool]:
    async with running(timeout_s=60) as pool:
        yield pool


def ids_of(encoded: Encoded) -> list[int]:
    ids = array("I")
    ids.frombytes(encoded.token_ids)
    return ids.tolist()


async def test_text_becomes_tokens_and_keys(pool: TokenizerPool) -> None:
    encoded = await pool.encode(EncodeText("m", CONTEXT, "x" * 40, keys=KEYS), 40)
    ids = ids_of(encoded)
    assert len(ids) == 40
    assert encoded.keys == b"".join(chain(b"root", ids, 16))
    packed = pb.TokenIds(ids=ids).SerializeToString()
    assert ids_of(await pool.encode(TakeTokens("m", CONTEXT, packed, KEYS), 40)) == ids
    assert await pool.decode(Decode("m", packed, keep_special=False)) == "x" * 40


@pytest.mark.parametrize(
    ("when", "sent"),
    [("before it listens", None), ("before it answers", None), ("in a header", 5), ("in a job", 100)],
)
async def test_child_of_a_parent_that_was_killed_ends_without_a_word(when: str, sent: int | None) -> None:
    """What it says would end up between the lines of the parent's log."""
    replies, theirs = os.pipe()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler_svc.text.tokenizer_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=theirs,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(theirs)
    if when != "before it listens":
        await asyncio.to_thread(os.read, replies, 1)
    os.close(replies)
    data = pickle.dumps(SPEC)
    _, said = await child.communicate((HEADER.pack(len(data)) + data)[:sent])
    assert said == b""
    assert child.returncode == 0


async def test_bos_is_put_before_text_once(pool: TokenizerPool) -> None:
    await pool.load(replace(SPEC, model="with bos", bos_token_id=1))
    assert ids_of(await pool.encode(EncodeText("with bos", CONTEXT, "a"), 1))[0] == 1
    again = ids_of(await pool.encode(EncodeText("with bos", CONTEXT, "<|im_start|>a"), 1))
    assert again.count(1) == 1
    assert 1 not in ids_of(
        await pool.encode(EncodeText("with bos", CONTEXT, "a", add_special_tokens=False), 1)
    )


async def test_prompt_is_held_to_the_context_of_its_own_time(pool: TokenizerPool) -> None:
    chat = pb.Chat()
    chat.messages.add(role="user", content="x" * 200)
    ids = pb.TokenIds(ids=range(3, 203))
    jobs = (
        EncodeText("m", CONTEXT, "x" * 200, keys=KEYS),
        EncodeChat("m", CONTEXT, chat.SerializeToString(), KEYS),
        TakeTokens("m", CONTEXT, ids.SerializeToString(), KEYS),
    )
    for job in jobs:
        for context in (3, 200):
            with pytest.raises(ServiceError) as caught:
                await pool.encode(replace(job, max_model_len=context), 200)
            assert caught.value.reason == "PROMPT_TOO_LONG"
        assert len(ids_of(await pool.encode(replace(job, max_model_len=201), 200))) == 200


@on_each_loop
async def test_children_that_are_killed_are_replaced_and_their_jobs_done() -> None:
    async with running(timeout_s=60) as pool:
        kill(_children())
        assert await asyncio.gather(*(length(pool, "still here") for _ in range(10))) == [10] * 10


@on_each_loop
async def test_children_that_died_while_idle_are_replaced_and_their_jobs_done() -> None:
    async with running(timeout_s=60) as pool:
        children = await both_children(pool)
        for _ in range(2):
            kill(children)
            await until(lambda: all(is_known_to_be_gone(child) for child in pool._children))
            assert await asyncio.gather(*(length(pool, "still here") for _ in range(10))) == [10] * 10
            children = await both_children(pool)


@contextmanager
def no_new_files() -> Iterator[None]:
    """Let this process open nothing, and so start nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_known_to_be_gone(child: _Child) -> bool:
    """Whether a child has been reaped and its pipes closed."""
    process = child._process
    assert process is not None
    assert process.stdin is not None
    return process.returncode is not None and process.stdin.is_closing()


@on_each_loop
async def test_jobs_wait_for_children_that_cannot_be_started_for_a_moment() -> None:
    with structlog.testing.capture_logs() as logs:
        async with running(timeout_s=60) as pool:
            kill(_children())
            with no_new_files():
                jobs = asyncio.gather(*(length(pool, "in the end") for _ in range(10)))
                await until(lambda: any(line["event"] == "tokenizer_cannot_start" for line in logs))
            assert await jobs == [10] * 10


async def test_jobs_that_wait_long_for_a_child_are_refused_with_a_retry_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(timeout_s=60) as pool:
        monkeypatch.setattr("scheduler_svc.text.tokenizer_pool._START_PATIENCE_S", 0.0)
        kill(_children())
        with no_new_files():
            for size_bytes in (1, 1 << 20):
                with pytest.raises(ServiceError, match=os.strerror(errno.EMFILE)) as caught:
                    await pool.encode(EncodeText("m", CONTEXT, "a"), size_bytes)
                assert caught.value.reason == "QUEUE_FULL"
                assert caught.value.retry_after_s
        assert await length(pool, "again") == 5


async def test_tokenizer_whose_child_died_while_loading_it_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_svc.text.tokenizer_pool._PAUSE_S", 0.0)
    dying = True

    async def exchange(self: _Child, message: TextSpec | Job, timeout_s: float) -> object:
        if dying and isinstance(message, TextSpec):
            kill(_children())
        return await real(self, message, timeout_s)

    real = _Child.exchange
    monkeypatch.setattr(_Child, "exchange", exchange)
    async with running(timeout_s=60, load=False) as pool:
        with pytest.raises(ServiceError, match="while it loads"):
            await pool.load(SPEC)
        dying = False
        with pytest.raises(ServiceError, match="while it loads"):
            await length(pool, "too soon")
        monkeypatch.setattr("scheduler_svc.text.tokenizer_pool._RELOAD_S", 0.0)
        assert await asyncio.gather(*(length(pool, "later") for _ in range(10))) == [5] * 10


async def test_server_of_jobs_that_a_bug_ends_is_seen_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TokenizerPool(size=1, timeout_s=60)
    monkeypatch.setattr(_Child, "start", None)
    (serving,) = pool.start()
    job = asyncio.ensure_future(pool.load(SPEC))
    await asyncio.wait([serving])
    assert isinstance(serving.exception(), TypeError)
    job.cancel()
    await pool.close()


async def test_template_that_never_ends_is_stopped_and_others_go_on() -> None:
    chat = pb.Chat(template_vars_json='{"spin": true}')
    chat.messages.add(role="user", content="a")
    async with running(timeout_s=5) as pool:
        endless = asyncio.create_task(pool.encode(EncodeChat("m", CONTEXT, chat.SerializeToString()), 10))
        others = [pool.encode(EncodeText("m", CONTEXT, f"number {index}"), 10) for index in range(50)]
        assert len(await asyncio.gather(*others)) == 50
        with pytest.raises(ServiceError, match="longer than 5 s") as caught:
            await endless
        assert caught.value.reason == "TOKENIZER_FAILED"
        assert len(ids_of(await pool.encode(EncodeText("m", CONTEXT, "after"), 5))) == 5


async def test_jobs_beyond_the_bound_are_refused(pool: TokenizerPool) -> None:
    jobs = [pool.encode(EncodeText("m", CONTEXT, "a"), 1) for _ in range(3000)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ServiceError)]
    assert refused
    assert {error.reason for error in refused} == {"QUEUE_FULL"}
    assert all(isinstance(result, Encoded | ServiceError) for result in results)


async def test_tokenizer_that_does_not_load_is_an_error_of_its_own(pool: TokenizerPool) -> None:
    with pytest.raises(ServiceError, match="tokenizer failed"):
        await pool.load(replace(SPEC, model="broken", tokenizer_json=b"{"))
    assert len(ids_of(await pool.encode(EncodeText("m", CONTEXT, "fine"), 4))) == 4


async def test_closed_pool_leaves_no_process() -> None:
    async with running(timeout_s=60):
        children = _children()
        assert children
    assert not set(children) & set(_children())


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def both_children(pool: TokenizerPool) -> list[int]:
    """The child processes, once both are idle."""
    await until(lambda: all(child.loaded for child in pool._children))
    return _children()


def _children() -> list[int]:
    """The tokenizer processes of this process, from the kernel; stacks of other tests may run beside them."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"tokenizer_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found
