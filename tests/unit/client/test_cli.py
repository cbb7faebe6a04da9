"""The command line against a real gRPC server."""

from __future__ import annotations

import http.server
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import grpc
import pytest
from octavo import AsyncClient, Client, InvalidRequestError
from octavo._sdk.health import Health
from octavo.cli import chat, health, output
from octavo.cli.main import COMMANDS, main
from octavo.gateway.config import GatewaySettings

from tests.unit.client.fake_scheduler import ThreadedScheduler, expected_text

Capture = pytest.CaptureFixture[str]


def octavo(threaded: ThreadedScheduler, *arguments: str) -> int:
    return main([*arguments, "--endpoint", threaded.fake.endpoint])


def test_generate_streams_the_text_to_stdout(threaded: ThreadedScheduler, capsys: Capture) -> None:
    code = octavo(threaded, "generate", "hello", "--max-tokens", "4", "--seed", "3")

    assert (code, capsys.readouterr().out) == (0, expected_text(3, 4) + "\n")


def test_generate_json_prints_the_whole_result(threaded: ThreadedScheduler, capsys: Capture) -> None:
    code = octavo(threaded, "generate", "hello", "--max-tokens", "2", "--seed", "3", "--n", "2", "--json")

    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [choice["text"] for choice in result["choices"]] == [expected_text(3, 2, at) for at in range(2)]
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["choices"][0]["usage"]["prompt_tokens"] == 3


def test_generate_dash_reads_the_prompt_from_stdin(
    threaded: ThreadedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert octavo(threaded, "generate", "-", "--max-tokens", "1") == 0

    assert threaded.fake.requests[0].text == "from a pipe"


def test_generate_flags_become_options_of_the_request(threaded: ThreadedScheduler) -> None:
    flags = "--temperature 0.5 --stop A --stop B --priority interactive --deadline 90 --ignore-eos"
    called_at = time.monotonic()
    octavo(threaded, "generate", "x", "--max-tokens", "1", *flags.split())
    took_ms = 1000 * (time.monotonic() - called_at)

    request = threaded.fake.requests[0]
    assert request.sampling.temperature == 0.5
    assert list(request.sampling.stop) == ["A", "B"]
    assert request.sampling.ignore_eos
    assert request.terms.priority == 1
    assert 89_999 - took_ms <= request.terms.deadline_ms <= 90_000


def test_generate_several_outputs_without_json_is_wrong_usage(
    threaded: ThreadedScheduler, capsys: Capture
) -> None:
    assert octavo(threaded, "generate", "x", "--n", "2") == 2
    assert "need --json" in capsys.readouterr().err


def test_chat_message_prints_the_answer(threaded: ThreadedScheduler, capsys: Capture) -> None:
    code = octavo(
        threaded, "chat", "--message", "hi", "--system", "be brief", "--max-tokens", "3", "--seed", "1"
    )

    assert (code, capsys.readouterr().out) == (0, expected_text(1, 3) + "\n")
    assert [turn.role for turn in threaded.fake.requests[0].chat.messages] == ["system", "user"]


def test_chat_conversation_keeps_its_turns_until_reset(
    threaded: ThreadedScheduler, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    said = "first\n\nsecond\n/reset\n/system be kind\nthird\n/unknown\n/quit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert octavo(threaded, "chat", "--max-tokens", "1", "--seed", "1") == 0

    turns = [[turn.content for turn in request.chat.messages] for request in threaded.fake.requests]
    assert turns == [
        ["first"],
        ["first", expected_text(1, 1), "second"],
        ["be kind", "third"],
    ]
    assert chat.HELP in capsys.readouterr().err


def test_chat_piped_in_ends_with_the_code_of_the_turn_that_failed(
    threaded: ThreadedScheduler, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    threaded.fake.refusing, threaded.fake.retry_delay_ms = "NO_WORKER", None
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))

    assert octavo(threaded, "chat") == 3
    assert "[NO_WORKER]" in capsys.readouterr().err
    assert len(threaded.fake.requests) == 1


def test_status_shows_workers_queues_and_outcomes(threaded: ThreadedScheduler, capsys: Capture) -> None:
    assert octavo(threaded, "status") == 0

    shown = capsys.readouterr().out
    for part in ("fake-1", "level 0 (normal)", "1 h 2 min", "3 live, 12 so far", "7 STOP, 2 QUEUE_FULL"):
        assert part in shown
    w0, w1 = (line.split() for line in shown.splitlines() if line.startswith(("w0", "w1")))
    assert w0[:5] == ["w0", "fake", "torch", "ready", "3/32"]
    assert "25%" in w0
    assert "lost" in w1
    assert "rank 1, 10.0.0.4:50051 stands by" in shown
    assert "held      by fake-2 10.0.0.3:50051: w2" in shown
    assert (
        "pressure  fake: backlog 62%, wait 40%, blocks 0%, missed deadlines 3%; "
        "first token expected after 900 ms\n"
    ) in shown
    assert "limits    32 sequences (set): w0\n" in shown
    assert "defaults  fake: temperature 0.2\nnames     fake: also other\n" in shown
    assert ["support", "fake", "12", "w0"] in [line.split() for line in shown.splitlines()]
    assert ["fake", "interactive", "4", "400", "250", "ms"] in [line.split() for line in shown.splitlines()]


def test_status_json_and_watch_print_each_status(threaded: ThreadedScheduler, capsys: Capture) -> None:
    assert octavo(threaded, "status", "--json", "--watch", "0.1") == 0

    documents = capsys.readouterr().out.split("\n{")
    assert len(documents) == 3
    assert len(json.loads(documents[0])["history"]) == 125
    assert json.loads(documents[0])["workers"][0]["pool"]["active"] == 10
    assert json.loads(documents[0])["models"][0]["generation_defaults"] == {"temperature": 0.2, "top_k": 0}


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        ("refuse INVALID_REQUEST 3", 2, "refused: INVALID_REQUEST"),
        ("refuse UNAVAILABLE 14", 3, "refused: UNAVAILABLE"),
        ("refuse QUEUE_FULL 8", 4, "try again in 1.5 s"),
        ("refuse QUEUE_TIMEOUT 4", 5, "QUEUE_TIMEOUT"),
        ("refuse POISON 10", 1, "[POISON]"),
        ("refuse BAD_API_KEY 16", 6, "[BAD_API_KEY]"),
    ],
)
def test_error_is_one_line_with_the_documented_exit_code(
    threaded: ThreadedScheduler, capsys: Capture, prompt: str, code: int, said: str
) -> None:
    assert octavo(threaded, "generate", prompt) == code

    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    ("endpoint", "code", "said"),
    [("127.0.0.1:1", 3, "127.0.0.1:1: connection refused"), ("http://x", 2, "must be host:port")],
)
def test_bad_endpoint_is_one_line(capsys: Capture, endpoint: str, code: int, said: str) -> None:
    assert main(["generate", "x", "--endpoint", endpoint, "--connect-timeout", "0.1"]) == code

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--logs", ".", "--insecure", "--host", "192.0.2.1"], "192.0.2.1: "),
        (["up", "--logs", "/dev/null/logs"], "/dev/null/logs: "),
        (["up"], "/dev/null/octavo/up: "),
        (["status", "--watch", "-1"], "interval_ms"),
        (["status", "--watch", "1e9"], "interval_ms"),
    ],
)
def test_mistake_of_the_user_is_one_line(
    threaded: ThreadedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: list[str],
    said: str,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    monkeypatch.setenv("OCTAVO_ENDPOINT", threaded.fake.endpoint)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert main([*arguments, *(["--gateway-port", "none"] if arguments[0] == "up" else [])]) == 2

    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    "command", ["generate x --max-tokens 3", "generate x --json --max-tokens 3", "--version"]
)
@pytest.mark.parametrize(("target", "said"), [(">/dev/full", "No space left"), (">&-", "stdout is closed")])
def test_stdout_that_takes_nothing_is_one_line(
    threaded: ThreadedScheduler, command: str, target: str, said: str, unbuffered: str
) -> None:
    done = subprocess.run(  # noqa: S602 # the shell's redirections are what is tested
        f"{sys.executable} -m octavo.cli.main {command} {target}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OCTAVO_ENDPOINT": threaded.fake.endpoint, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )

    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("octavo: error: ")
    assert said in done.stderr


def _health_server(answer: bytes) -> tuple[grpc.Server, int]:
    server = grpc.server(ThreadPoolExecutor(1))
    check = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
    handlers = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


@pytest.mark.parametrize(("answer", "code"), [(b"\x08\x01", 0), (b"\x08\x02", 3)])
def test_health_asks_the_endpoint_of_the_environment_and_no_proxy(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, code: int
) -> None:
    server, port = _health_server(answer)
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.setenv("OCTAVO_ENDPOINT", f"127.0.0.1:1,127.0.0.1:{port}")

    assert main(["health", "--timeout", "30"]) == code
    server.stop(None)


@pytest.mark.parametrize(("answer", "code"), [(b"\x08\x01", 0), (b"\x08\x02", 0), (None, 3)])
def test_health_alive_is_content_with_any_answer(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, code: int
) -> None:
    server, port = _health_server(answer or b"")
    if answer is None:
        server.stop(None).wait()

    assert main(["health", "--alive", "--timeout", "30", f"127.0.0.1:{port}"]) == code
    server.stop(None)


class _GatewayHealth(http.server.BaseHTTPRequestHandler):
    """Answers 200 to /ok/health and 503 to everything else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ok/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        del format, args


def test_health_of_a_url_asks_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http.server.HTTPServer(("127.0.0.1", 0), _GatewayHealth) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        assert main(["health", f"{url}/ok"]) == 0
        assert main(["health", url]) == 3
        assert main(["health", url, "--alive"]) == 0
        server.shutdown()
    assert main(["health", url, "--alive"]) == 3


def test_health_address_without_a_port_means_the_port_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def ask(endpoint: str, timeout_s: float, tls: object) -> Health:
        asked.append(endpoint)
        return Health.UNREACHABLE

    monkeypatch.setattr(health, "ask_health", ask)

    assert main(["health", "somewhere"]) == 3
    assert asked == ["somewhere:50051"]


def test_gateway_takes_the_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GatewaySettings.load({}).scheduler.endpoint == "127.0.0.1:50051"
    monkeypatch.setenv("OCTAVO_ENDPOINT", "10.0.0.4:50051,10.0.0.5:50051")
    assert GatewaySettings.load({}).scheduler.endpoint == "10.0.0.4:50051,10.0.0.5:50051"
    monkeypatch.setenv("OCTAVO_GATEWAY_ENDPOINT", "10.0.0.6:50051")
    assert GatewaySettings.load({}).scheduler.endpoint == "10.0.0.6:50051"


def test_endpoint_comes_from_the_environment(
    threaded: ThreadedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ENDPOINT", threaded.fake.endpoint)

    assert main(["generate", "x", "--max-tokens", "1"]) == 0


def test_api_key_comes_from_a_file_or_the_environment_and_from_no_flag(
    threaded: ThreadedScheduler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "key"
    path.write_text("octavo_from-a-file\n")
    monkeypatch.setenv("OCTAVO_API_KEY", "octavo_from-env")

    assert octavo(threaded, "generate", "x", "--max-tokens", "1") == 0
    assert octavo(threaded, "generate", "x", "--max-tokens", "1", "--api-key-file", str(path)) == 0
    assert threaded.fake.keys == ["Bearer octavo_from-env", "Bearer octavo_from-a-file"]
    capsys.readouterr()
    assert octavo(threaded, "generate", "x", "--api-key-file", str(tmp_path / "none")) == 2
    assert "none: No such file" in capsys.readouterr().err
    path.write_text("octavo_two words")
    assert octavo(threaded, "generate", "x", "--api-key-file", str(path)) == 2
    assert "octavo_two" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        octavo(threaded, "generate", "x", "--api-key", "octavo_visible")


def test_reader_leaves_early_ends_quietly(threaded: ThreadedScheduler) -> None:
    command = f"{sys.executable} -m octavo.cli.main generate x --max-tokens 20000 | head -c 10"
    done = subprocess.run(  # noqa: S602 # a pipe is what is tested
        command,
        shell=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "OCTAVO_ENDPOINT": threaded.fake.endpoint},
        check=False,
    )

    assert (len(done.stdout), done.stderr) == (10, b"")


def test_no_command_prints_every_command(capsys: Capture) -> None:
    assert main([]) == 2

    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in shown


def test_version_is_printed(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo 0.")


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_service_help_lists_the_settings_with_their_defaults(capsys: Capture, service: str) -> None:
    with pytest.raises(SystemExit):
        main([service, "--help"])

    shown = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs N" in shown
    assert "--enable-faults, --no-enable-faults" in shown
    assert "(default: 127.0.0.1:50" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker", "--max-num-seqs", "many"], "max_num_seqs"),
        (["worker", "--listen", "nowhere"], "listen"),
        (["scheduler", "--policy", "best"], "policy"),
        (["scheduler", "--workers", "nonsense"], "workers"),
    ],
)
def test_service_wrong_setting_is_named_in_one_line(capsys: Capture, arguments: list[str], said: str) -> None:
    assert main(arguments) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("service", ["scheduler", "worker", "up"])
def test_service_without_its_extra_names_the_extra(service: str) -> None:
    block = (
        "import sys; sys.modules['pydantic'] = None; "
        f"from octavo.cli.main import main; sys.exit(main(['{service}']))"
    )
    done = subprocess.run(  # our own interpreter
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=30, check=False
    )

    extra = "scheduler" if service == "up" else service
    assert done.returncode == 1
    assert f"pip install 'octavo[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "text", "system"),
    [
        (["--text", "as it is"], "as it is", []),
        (["--file", "-"], "from a pipe", []),
        (["--system", "be brief"], "", ["be brief"]),
    ],
)
def test_pin_sends_the_prefix_and_says_who_keeps_it(
    threaded: ThreadedScheduler,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    text: str,
    system: list[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))

    assert octavo(threaded, "pin", "support", *flags, "--tenant", "shop", "--cache-salt", "s") == 0

    (request,) = threaded.fake.operations.pins
    assert (request.name, request.text, request.tenant, request.cache_salt) == ("support", text, "shop", "s")
    assert [turn.content for turn in request.chat.messages] == system
    said = "pinned support: 2 blocks of 40 tokens, on 1 workers; no room within the pin budget of w1\n"
    assert capsys.readouterr().out == said
    assert octavo(threaded, "unpin", "support") == 0
    assert capsys.readouterr().out == "unpinned support: 2 blocks\n"


def test_pin_of_a_file_that_is_not_there_is_wrong_usage(threaded: ThreadedScheduler, capsys: Capture) -> None:
    assert octavo(threaded, "pin", "support", "--file", "/nowhere") == 2
    assert "/nowhere" in capsys.readouterr().err


def test_usage_prints_shares_and_costs_with_idle_time_as_a_line(
    threaded: ThreadedScheduler, capsys: Capture
) -> None:
    assert octavo(threaded, "usage") == 0
    header, tenant, idle, unassigned = capsys.readouterr().out.splitlines()
    assert header == "from,until,tenant,requests,prompt_tokens,output_tokens,device_s,share,cost"
    span = "1970-01-01T00:00:00+00:00,1970-01-01T00:02:00+00:00"
    assert tenant == f"{span},a,4,60,80,54.000000,0.450000,0.060000"
    assert idle == f"{span},(idle),0,0,0,66.000000,0.550000,0.073333"
    assert unassigned == f"{span},(unassigned),0,0,0,0.000000,0.000000,0.000000"

    assert octavo(threaded, "usage", "--since", "1m", "--by-minute") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("1970-01-01T00:01:00+00:00,")


@pytest.mark.parametrize(
    ("worker", "code", "said"),
    [
        ("w0", 0, "w0  ok, 100 blocks, 1.2 ms\n"),
        ("w1", 1, "w1  violated: free + active == total: 99\n"),
        ("w2", 1, "w2  no verdict: UNAVAILABLE: gone\n"),
    ],
)
def test_audit_says_what_each_worker_found(
    threaded: ThreadedScheduler, capsys: Capture, worker: str, code: int, said: str
) -> None:
    assert octavo(threaded, "audit", worker) == code
    assert capsys.readouterr().out == said
    assert octavo(threaded, "audit") == 1
    assert said in capsys.readouterr().out


def test_drain_of_a_worker_that_runs_nothing_waits_for_nobody(
    threaded: ThreadedScheduler, capsys: Capture
) -> None:
    assert octavo(threaded, "drain", "worker", "w1", "--wait") == 0
    assert capsys.readouterr().out == "draining, 3 running and 0 waiting\n"
    assert threaded.fake.operations.drained == ["w1"]


def test_drain_of_a_scheduler_waits_until_it_is_gone(threaded: ThreadedScheduler) -> None:
    threaded.fake.operations.on_drain = lambda: threaded.run(threaded.fake.stop, 0.2)

    assert octavo(threaded, "drain", "scheduler", "--wait") == 0
    assert threaded.fake.operations.drained == [""]


def test_drain_of_a_scheduler_that_is_one_of_several_is_wrong_usage(
    threaded: ThreadedScheduler, capsys: Capture
) -> None:
    assert main(["drain", "scheduler", "--endpoint", f"{threaded.fake.endpoint},127.0.0.1:1"]) == 2
    assert "must name one scheduler" in capsys.readouterr().err
    assert threaded.fake.operations.drained == []


def test_sdk_pins_text_tokens_and_messages(threaded: ThreadedScheduler) -> None:
    with Client(threaded.fake.endpoint) as client:
        pinned = client.pin_prefix("a", "text", model="fake")
        client.pin_prefix("b", [1, 2, 3])
        client.pin_prefix("c", [{"role": "system", "content": "hi"}], tools=[{"type": "function"}])
        client.pin_prefix("d", "a turn", add_generation_prompt=True)
        with pytest.raises(InvalidRequestError, match=r"tokens\.ids"):
            client.pin_prefix("e", [-1])
        assert client.unpin_prefix("a") == 2

    assert (pinned.blocks, pinned.workers, pinned.without_room) == (2, 1, ("w1",))
    text, tokens, chat, turn = threaded.fake.operations.pins
    assert (text.text, text.model) == ("text", "fake")
    assert list(tokens.tokens.ids) == [1, 2, 3]
    assert not chat.chat.HasField("add_generation_prompt")
    assert json.loads(chat.chat.tools_json) == [{"type": "function"}]
    assert turn.chat.messages[0].content == "a turn"
    assert turn.chat.add_generation_prompt


async def test_sdk_reads_status_and_drains(threaded: ThreadedScheduler) -> None:
    async with AsyncClient(threaded.fake.endpoint) as client:
        status = await client.status()
        drained = await client.drain(grace=2)
        watched = [one async for one in client.watch_status(0.1)]

    assert status.workers[0].pool.active == 10
    assert status.queues[0].oldest_wait_s == 0.25
    assert (drained.running, drained.waiting) == (3, 2000)
    assert watched == [status] * 3


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0123, "12 ms"), (2.34, "2.3 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
)
def test_duration_reads_as_people_say_it(seconds: float, shown: str) -> None:
    assert output.duration(seconds) == shown


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_text_that_the_terminal_lacks_is_escaped(threaded: ThreadedScheduler, flags: list[str]) -> None:
    arguments = ["generate", "x", *flags, "--max-tokens", "3", "--seed", "1"]
    told = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *arguments, "--endpoint", threaded.fake.endpoint],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert (told.returncode, told.stderr) == (0, b"")
    assert told.stdout.isascii()
