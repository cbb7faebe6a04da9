"""A pair of scheduler processes: one is killed, comes back, and stands still; no stream is lost or wrong."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from octavo import Client, GenerateResult, OctavoError, Stream
from octavo.stack import Child, Stack, StackConfig

from tests.e2e.conftest import CALM, SIM
from tests.e2e.scheduler_stack import WAIT_S


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Stack]:
    config = StackConfig(model="sim", standby=True, worker_args=SIM, scheduler_args=CALM, folder=tmp_path)
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def has_the_worker(scheduler: Child) -> bool:
    try:
        with Client(scheduler.address, connect_timeout=0.2) as client:
            return [worker.state for worker in client.status().workers] == ["ready"]
    except OctavoError:
        return False


def begin(client: Client) -> tuple[Stream, list[int]]:
    """Return a stream that has begun, and its tokens so far."""
    stream = client.stream("a long story", max_tokens=400, seed=5, temperature=1.0, ignore_eos=True)
    return stream, read(stream, 1)


def read(stream: Stream, tokens: int) -> list[int]:
    """Return at least so many further tokens."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += next(stream).token_ids
    return ids


def finish(stream: Stream, ids: list[int]) -> GenerateResult:
    """Return the result of a stream whose deltas must add up to it."""
    for delta in stream:
        ids += delta.token_ids
    assert tuple(ids) == stream.result.choices[0].token_ids
    return stream.result


def test_scheduler_is_killed_and_comes_back_streams_go_on(pair: Stack) -> None:
    assert pair.standby is not None
    with Client(pair.endpoints) as client:
        stream, ids = begin(client)
        undisturbed = finish(stream, ids).text

        stream, ids = begin(client)
        pair.scheduler.kill()
        ids += read(stream, 20)
        assert has_the_worker(pair.standby)
        pair.scheduler.start()
        until(lambda: has_the_worker(pair.scheduler))
        assert finish(stream, ids).text == undisturbed
        with Client(pair.standby.address) as other:
            worker = other.status().workers[0]
            assert (worker.state, worker.held_by_endpoint) == ("held", pair.scheduler.address)
            assert other.status().live_requests == 0


def test_scheduler_that_stood_still_gets_its_workers_back_and_strands_nobody(pair: Stack) -> None:
    assert pair.standby is not None
    with Client(pair.endpoints) as client:
        stream, ids = begin(client)
        undisturbed = finish(stream, ids).text

        stream, ids = begin(client)
        pair.scheduler.signal(signal.SIGSTOP)
        until(lambda: has_the_worker(pair.standby))
        pair.scheduler.signal(signal.SIGCONT)
        assert finish(stream, ids).text == undisturbed
        until(lambda: has_the_worker(pair.scheduler))
        assert client.generate("hello", max_tokens=3, seed=1).choices


def test_scheduler_that_is_drained_hands_over(pair: Stack) -> None:
    assert pair.standby is not None
    with Client(pair.endpoints) as client:
        stream, ids = begin(client)
        undisturbed = finish(stream, ids).text

        stream, ids = begin(client)
        pair.scheduler.signal(signal.SIGTERM)
        assert pair.scheduler.process.wait(WAIT_S) == 0
        assert finish(stream, ids).text == undisturbed
        assert has_the_worker(pair.standby)
