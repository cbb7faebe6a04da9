"""The synchronous client, used from threads, forks and dying interpreters."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from octavo import Client, ClientClosedError, GenerateResult, InternalError, RequestCancelledError

from tests.unit.client.fake_scheduler import ThreadedScheduler, expected_text


@pytest.fixture
def client(threaded: ThreadedScheduler) -> Iterator[Client]:
    with Client(threaded.fake.endpoint, connect_timeout=30) as one:
        yield one


def test_generate_chat_and_unary_calls_answer(client: Client) -> None:
    assert client.generate("hello", max_tokens=3, seed=1).text == expected_text(1, 3)
    assert client.chat("hello", max_tokens=3, seed=1).text == expected_text(1, 3)
    assert client.tokenize("hi").token_ids == (104, 105)
    assert client.detokenize([104, 105]) == "hi"
    assert [model.id for model in client.models()] == ["fake"]


def test_stream_yields_every_token_once(client: Client) -> None:
    with client.stream("hello", max_tokens=30, seed=1) as stream:
        text = "".join(delta.text for delta in stream)

    assert text == expected_text(1, 30) == stream.result.text


def test_stream_that_fails_raises_after_its_output(client: Client) -> None:
    stream = client.chat_stream("x", max_tokens=2, seed=1)
    assert "".join(delta.text for delta in stream) == expected_text(1, 2)

    failing = client.stream("fail STEP_FAILED 13", seed=5)
    texts = []
    while "".join(texts) != expected_text(5, 2):
        texts.append(next(failing).text)
    with pytest.raises(InternalError):
        next(failing)


def test_batch_and_batch_iter_return_each_outcome(client: Client) -> None:
    ends = client.batch(["a", "b", "c"], max_tokens=2, seed=1)
    iterated = dict(client.batch_iter(["a", "b", "c"], max_tokens=2, seed=1))

    assert [end.text for end in ends if isinstance(end, GenerateResult)] == [expected_text(1, 2)] * 3
    assert sorted(iterated) == [0, 1, 2]


def test_batch_over_a_generator_that_uses_the_client_answers(client: Client) -> None:
    prompts = (client.tokenize(text).token_ids for text in ("a", "b"))
    ends = client.batch(prompts, max_tokens=2, seed=1)

    assert [end.text for end in ends if isinstance(end, GenerateResult)] == [expected_text(1, 2)] * 2


def test_batch_iter_yields_what_has_ended_before_it_takes_the_next_prompt(client: Client) -> None:
    ended: list[int] = []
    pulled = 0

    def prompts() -> Iterator[str]:
        nonlocal pulled
        while not ended:
            client.detokenize([104])  # Time for an outcome to come.
            pulled += 1
            yield "x"

    for index, _ in client.batch_iter(prompts(), max_tokens=1, seed=1):
        ended.append(index)

    assert sorted(ended) == list(range(pulled))
    assert pulled < 1024


def test_call_on_the_thread_of_the_client_is_refused_instead_of_waiting_for_itself(client: Client) -> None:
    async def wait_for_itself() -> None:
        client.models()

    with pytest.raises(RuntimeError, match="own thread"):
        client._thread.run(wait_for_itself())


def test_many_threads_share_one_client(client: Client, threaded: ThreadedScheduler) -> None:
    def work(seed: int) -> bool:
        if seed % 2:
            return client.generate("x", max_tokens=5, seed=seed).text == expected_text(seed, 5)
        return "".join(one.text for one in client.stream("x", max_tokens=5, seed=seed)) == expected_text(
            seed, 5
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(100)))
    assert threaded.fake.sessions == 1


def test_break_out_of_a_stream_cancels_on_the_server(client: Client, threaded: ThreadedScheduler) -> None:
    threaded.run(threaded.fake.hold, 3)
    for _ in client.stream("hello", max_tokens=100, request_id="gone"):
        break
    gc.collect()

    threaded.until(lambda: threaded.fake.cancelled == ["gone"])


def test_close_from_another_thread_ends_a_blocked_stream(client: Client, threaded: ThreadedScheduler) -> None:
    threaded.run(threaded.fake.hold, 0)
    stream = client.stream("hello", max_tokens=100)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(next, stream)
        threaded.until(lambda: len(threaded.fake.requests) == 1)
        stream.close()
        with pytest.raises(RequestCancelledError):
            blocked.result(timeout=10)


def test_client_dropped_ends_its_thread_and_its_requests(threaded: ThreadedScheduler) -> None:
    threaded.run(threaded.fake.hold, 1)
    client = Client(threaded.fake.endpoint)
    stream = client.stream("hello", max_tokens=100, request_id="dropped")
    next(stream)
    (thread,) = (one for one in threading.enumerate() if one.name == "octavo-client")

    del client, stream
    gc.collect()

    thread.join(timeout=10)
    assert not thread.is_alive()
    threaded.until(lambda: "dropped" in threaded.fake.cancelled)


def test_closed_client_refuses_and_closes_again_quietly(client: Client) -> None:
    client.close()
    client.close()

    with pytest.raises(ClientClosedError, match="closed"):
        client.generate("x")
    with pytest.raises(ClientClosedError, match="closed"):
        client.stream("x")


SCRIPT_PROLOGUE = """
import os, sys
import octavo
client = octavo.Client(sys.argv[1])
"""


def start_script(threaded: ThreadedScheduler, body: str) -> subprocess.Popen[str]:
    # From Python 3.12 on a fork beside threads is warned of.
    quiet = "ignore:This process:DeprecationWarning"
    return subprocess.Popen(  # our own interpreter
        [sys.executable, "-W", quiet, "-c", SCRIPT_PROLOGUE + body, threaded.fake.endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )


def run_script(threaded: ThreadedScheduler, body: str) -> subprocess.CompletedProcess[str]:
    with start_script(threaded, body) as process:
        try:
            told, problems = process.communicate(timeout=60)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, told, problems)


def test_client_carried_over_a_fork_says_so_and_the_parent_goes_on(threaded: ThreadedScheduler) -> None:
    body = """
client.generate("x", max_tokens=1)
stream = client.stream("x", max_tokens=3)
batch = client.batch_iter(["a", "b"], max_tokens=1)
next(batch)
child = os.fork()
if child == 0:
    for use in (lambda: client.generate("x"), lambda: next(stream), lambda: next(batch)):
        try:
            use()
        except octavo.ClientClosedError as error:
            print("child:", error.message, flush=True)
    del client, stream, batch
    sys.exit(0)
_, status = os.waitpid(child, 0)
print("parent:", status, len(list(stream)) > 0, client.generate("x", max_tokens=1).finish_reason.name)
"""
    done = run_script(threaded, body)

    assert done.stdout.count("child: the client was made before a fork") == 3, done.stderr
    assert "parent: 0 True LENGTH" in done.stdout, done.stderr
    assert done.stderr == ""


def test_interpreter_exits_with_a_stream_open_hangs_and_prints_nothing(threaded: ThreadedScheduler) -> None:
    threaded.run(threaded.fake.hold, 1)
    done = run_script(threaded, "stream = client.stream('x', max_tokens=50); next(stream)")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    threaded.until(lambda: len(threaded.fake.cancelled) == 1)


def test_interrupt_while_waiting_cancels_the_request(threaded: ThreadedScheduler) -> None:
    body = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    client.generate("x", max_tokens=50)
except KeyboardInterrupt:
    print("interrupted")
"""
    threaded.run(threaded.fake.hold, 0)
    with start_script(threaded, body) as process:
        try:
            threaded.until(lambda: len(threaded.fake.requests) == 1)
            process.send_signal(signal.SIGINT)
            told, problems = process.communicate(timeout=60)
        finally:
            process.kill()

    assert told == "interrupted\n", problems
    threaded.until(lambda: len(threaded.fake.cancelled) == 1)
