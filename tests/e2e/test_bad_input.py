"""Malformed, hostile or huge input through real processes: a clear error, and every other request goes on."""

from __future__ import annotations

import json
import math
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from octavo import AsyncClient, InvalidRequestError, OctavoError, UnknownModelError
from octavo.stack import Stack, StackConfig, StackError
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

BYSTANDER = {"max_tokens": 120, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(sim_stack: Stack) -> Callable[[], Any]:
    """What the other request generates when nobody disturbs it."""
    known: list[tuple[int, ...]] = []

    async def once() -> tuple[int, ...]:
        if not known:
            async with AsyncClient(sim_stack.endpoint) as client:
                known.append((await client.generate("the other request", **BYSTANDER)).token_ids)  # type: ignore[arg-type]
        return known[0]

    return once


@pytest.fixture
async def client(sim_stack: Stack, expected: Callable[[], Any]) -> AsyncIterator[AsyncClient]:
    """A client on whose stream another request runs through the whole test, and must come out unharmed."""
    async with AsyncClient(sim_stack.endpoint) as one, _unharmed(one, await expected()):
        yield one


@asynccontextmanager
async def _unharmed(client: AsyncClient, expected: tuple[int, ...]) -> AsyncIterator[None]:
    stream = client.stream("the other request", **BYSTANDER)  # type: ignore[arg-type]
    first = await anext(stream)
    yield
    rest = [token for delta in [delta async for delta in stream] for token in delta.token_ids]
    assert (*first.token_ids, *rest) == expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("", "text"), ([], "tokens.ids"), ([5, 100_000], "tokens.ids"), ([2**32 - 1], "tokens.ids")],
)
async def test_prompt_empty_or_out_of_range_names_its_field(
    client: AsyncClient, prompt: str | list[int], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate(prompt)

    assert caught.value.reason == "INVALID_REQUEST"
    assert [one.field.partition("[")[0] for one in caught.value.violations] == [field]


@pytest.mark.parametrize("beyond", [0, 1, 5000])
async def test_prompt_as_long_as_the_context_or_longer_states_the_limit(
    client: AsyncClient, beyond: int
) -> None:
    (model,) = await client.models()
    with pytest.raises(InvalidRequestError, match=str(model.max_model_len)) as caught:
        await client.generate([5] * (model.max_model_len + beyond))

    assert caught.value.reason == "PROMPT_TOO_LONG"


async def test_unknown_model_is_named(client: AsyncClient) -> None:
    for attempt in (client.generate("x", model="gpt-17"), client.tokenize("x", model="gpt-17")):
        with pytest.raises(UnknownModelError, match="gpt-17"):
            await attempt


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "chat.messages"),
        ([{"role": "wizard", "content": "hi"}], "chat.messages[0].role"),
        ([{"role": "user", "content": "hi"}, {"role": "", "content": "hi"}], "chat.messages[1].role"),
    ],
)
async def test_chat_without_turns_or_with_an_unknown_role_names_the_turn(
    client: AsyncClient, messages: list[dict[str, str]], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.chat(messages)

    assert [one.field for one in caught.value.violations] == [field]


# Values that the SDK refuses by itself go over the wire raw, as from any other client.


async def refusal(endpoint: str, request: bytes) -> tuple[grpc.StatusCode, list[str]]:
    """Send a serialized GenerateRequest; return the code and the fields named by its refusal."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        method = channel.unary_stream("/octavo.v1.Generation/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(method(request, timeout=20)))
    violations: list[str] = []
    for key, value in caught.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                bad_request = error_details_pb2.BadRequest()
                if detail.Unpack(bad_request):
                    violations += [one.field for one in bad_request.field_violations]
    return caught.value.code(), violations


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("n", 0),
        ("n", 1000),
    ],
)
async def test_sampling_value_out_of_range_names_its_field(
    client: AsyncClient, sim_stack: Stack, name: str, value: float
) -> None:
    del client
    request = pb.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(**{name: value}))  # type: ignore[arg-type]

    code, fields = await refusal(sim_stack.endpoint, request.SerializeToString())

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert fields == [f"sampling.{name}"]


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x1a\x03a\xff\xfe", b"\x12\x02\xc3\x28\x1a\x01a", b"\x1a\xff\xff\xff\xff\x0f", b"\xff" * 40],
    ids=["text not UTF-8", "model not UTF-8", "length past the end", "garbage"],
)
async def test_bytes_that_are_no_message_are_refused_as_the_clients_fault(
    client: AsyncClient, sim_stack: Stack, request_bytes: bytes
) -> None:
    del client
    code, _ = await refusal(sim_stack.endpoint, request_bytes)

    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_message_of_100_megabytes_is_refused(client: AsyncClient, sim_stack: Stack) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate("x" * 100_000_000)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"

    huge = pb.GenerateRequest(text="x" * 100_000_000).SerializeToString()
    code, _ = await refusal(sim_stack.endpoint, huge)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_prompt_of_ten_megabytes_is_refused_and_delays_nobody(client: AsyncClient) -> None:
    with pytest.raises(OctavoError) as caught:
        await client.generate("word " * 2_000_000)

    assert caught.value.reason in ("PROMPT_TOO_LONG", "INVALID_REQUEST")


# Files of a model.


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the Llama family in a folder, as Hugging Face keeps them."""
    from tests.unit.worker.runner.torch.families import FAMILIES, save_model  # noqa: PLC0415 # loads torch

    folder = tmp_path_factory.mktemp("tiny")
    save_model(FAMILIES["llama"], folder)
    return folder


def copy_of(model: Path, folder: Path) -> Path:
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow
async def test_chat_template_broken_fails_chats_only(tiny_model: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model, tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for turn in %}"}))
    with Stack(StackConfig(model=str(folder))) as stack:
        stack.wait_ready(120)
        async with AsyncClient(stack.endpoint) as client:
            alone = await client.generate("the other request", **BYSTANDER)  # type: ignore[arg-type]
            async with _unharmed(client, alone.token_ids):
                with pytest.raises(InvalidRequestError, match="template") as caught:
                    await client.chat("hi")

    assert caught.value.reason == "CHAT_TEMPLATE"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def corrupt_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def not_json(path: Path) -> None:
    path.write_text("{ this is not json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("model.safetensors", truncated),
        ("model.safetensors", corrupt_header),
        ("config.json", not_json),
        ("config.json", Path.unlink),
        ("tokenizer.json", truncated),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_model_file_damaged_is_named_and_the_worker_exits_with_3(
    tiny_model: Path, tmp_path: Path, file: str, harm: Callable[[Path], object]
) -> None:
    folder = copy_of(tiny_model, tmp_path)
    harm(folder / file)

    assert re.search(rf"worker-0 ended with exit code 3: .*{re.escape(file)}", failure(str(folder)))


@pytest.mark.slow
def test_model_weights_missing_names_the_folder_and_the_worker_exits_with_3(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_model, tmp_path)
    (folder / "model.safetensors").unlink()

    assert re.search(rf"worker-0 ended with exit code 3: {folder}: no safetensors file", failure(str(folder)))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model"])
def test_gguf_file_damaged_is_named_and_the_worker_exits_with_3(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)

    assert re.search(r"worker-0 ended with exit code 3: .*broken\.gguf", failure(str(path)))


def test_model_folder_missing_is_named_and_the_worker_exits_with_3(tmp_path: Path) -> None:
    assert re.search(
        r"worker-0 ended with exit code 3: .*no-such-model", failure(str(tmp_path / "no-such-model"))
    )


def failure(model: str, **settings: Any) -> str:
    """Start a stack that cannot start and return why."""
    with Stack(StackConfig(model=model, **settings)) as stack:
        with pytest.raises(StackError) as caught:
            stack.wait_ready(120)
        return str(caught.value)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_port_in_use_is_named(taken_port: int, service: str) -> None:
    settings: dict[str, Any] = {"port" if service == "scheduler" else "worker_port": taken_port}
    said = failure("sim", worker_args=("--runner", "sim"), **settings)

    assert re.search(rf"{service}\S* ended with exit code 4: .*{taken_port}.*in use", said)
