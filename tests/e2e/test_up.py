"""`octavo up` as a person runs it: it comes up, answers, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from octavo import Client
from octavo.cli.main import main
from octavo.errors import UnavailableError
from octavo.service.tls import Tls

NO_GATEWAY = ("--gateway-port", "none")
SIM = (*NO_GATEWAY, "--model", "sim", "--worker-arg=--runner=sim", "--port", "0", "--worker-port", "0")
OCTAVO = (sys.executable, "-m", "octavo.cli.main")


@contextmanager
def up(logs: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*OCTAVO, "up", "--logs", str(logs), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        start_new_session=True,
    )
    with process:  # It waits for the process at its end.
        try:
            yield process
        finally:
            process.kill()


def read_until_up(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ctrl-C stops everything" in line:
            return said
    assert process.stderr is not None
    raise AssertionError(f"octavo up ended: {said}{process.stderr.read()}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    assert len(found) >= 2
    return found


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=20)
    return not alive


def test_up_prints_endpoints_and_a_command_that_works(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--workers", "2") as process:
        said = read_until_up(process)
        endpoint = re.search(r"scheduler +(\S+)", said)
        command = re.search(r"octavo (chat .*)", said)
        assert endpoint is not None
        assert command is not None
        assert len(re.findall(r"worker-\d +127\.0\.0\.1:\d+", said)) == 2

        with Client(endpoint[1]) as client:
            assert len(client.generate("hello", max_tokens=3).token_ids) == 3
        answered = subprocess.run(  # noqa: S602 # as printed, for a shell
            f"{' '.join(OCTAVO)} {command[1]} --max-tokens 5",
            shell=True,
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert len(answered.stdout) > 1


def test_up_with_a_gateway_serves_http_until_it_ends(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--gateway-port", "0") as process:
        said = read_until_up(process)
        gateway = re.search(r"gateway +(http://\S+)/v1", said)
        assert gateway is not None
        with urllib.request.urlopen(f"{gateway[1]}/v1/models", timeout=20) as answer:  # noqa: S310 # ours
            assert b'"sim"' in answer.read()
        children = descendants(process)
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == 0
        assert gone(children)


def test_up_with_certificates_speaks_tls_on_every_port(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    assert main(["certs", "--out", str(certs)]) == 0
    with up(tmp_path / "logs", *SIM, "--gateway-port", "0", "--tls", str(certs)) as process:
        said = read_until_up(process)
        addresses = re.findall(r"(?:gateway|metrics) +(\w+)://([0-9.:]+)", said)
        assert [scheme for scheme, _ in addresses] == ["https"] * 3
        told = dict(word.split("=") for word in said.partition("export ")[2].splitlines()[0].split())
        tls = Tls.from_environment(told)
        assert tls is not None
        for _, address in addresses:
            path = "metrics" if address != addresses[0][1] else "v1/models"
            with urllib.request.urlopen(
                f"https://{address}/{path}", timeout=20, context=tls.ssl_context()
            ) as answer:
                assert answer.status == 200
            with pytest.raises(OSError, match=r"reset|closed|disconnected"):
                urllib.request.urlopen(f"http://{address}/{path}", timeout=20)
        command = said.partition("octavo chat")[2].splitlines()[0]
        endpoint = command.split()[command.split().index("--endpoint") + 1]
        with Client(endpoint, tls=tls) as client:
            assert client.generate("hello", max_tokens=2).usage.completion_tokens == 2
        with Client(endpoint, connect_timeout=1) as stranger, pytest.raises(UnavailableError, match="TLS"):
            stranger.models()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_told_to_stop_ends_everything_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path, *SIM) as process:
        read_until_up(process)
        children = descendants(process)
        process.send_signal(number)

        assert process.wait(30) == 0
        assert gone(children)


def test_up_stopped_while_it_starts_ends_everything(tmp_path: Path) -> None:
    with up(tmp_path, *SIM) as process:
        assert process.stderr is not None
        assert "starting" in process.stderr.readline()
        children = descendants(process)
        process.send_signal(signal.SIGINT)

        assert process.wait(30) == 0
        assert gone(children)


def test_up_killed_leaves_no_orphan(tmp_path: Path) -> None:
    with up(tmp_path, *SIM) as process:
        read_until_up(process)
        children = descendants(process)
        process.kill()

        assert gone(children)


def victim_among(children: list[psutil.Process], name: str) -> psutil.Process:
    (found,) = (
        child for child in children if "octavo._child" in child.cmdline() and child.cmdline()[5:6] == [name]
    )
    return found


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_up_starts_a_killed_process_again_while_a_client_streams(tmp_path: Path, victim: str) -> None:
    """The promise of the README: a pause and nothing else."""
    with up(tmp_path, *SIM) as process:
        endpoint = re.search(r"scheduler +(\S+)", read_until_up(process))
        assert endpoint is not None
        with Client(endpoint[1], reconnect_timeout=60) as client:
            undisturbed = client.generate("go on", max_tokens=200, seed=1).token_ids
            stream = client.stream("go on", max_tokens=200, seed=1)
            next(stream)
            victim_among(descendants(process), victim).kill()
            for _ in stream:
                pass
            assert stream.result.token_ids == undisturbed

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert re.search(rf"{victim}\S* was killed by SIGKILL; starting it again in 0.25 s", said)


def test_up_a_process_that_keeps_dying_is_shown_and_serves_when_that_is_over(tmp_path: Path) -> None:
    with up(tmp_path, *SIM) as process:
        endpoint = re.search(r"scheduler +(\S+)", read_until_up(process))
        assert endpoint is not None
        assert process.stderr is not None
        dead: set[int] = set()
        while len(dead) < 5:
            with suppress(psutil.Error, ValueError):
                worker = victim_among(psutil.Process(process.pid).children(recursive=True), "worker")
                if worker.pid not in dead:
                    worker.kill()
                    dead.add(worker.pid)
        while "died 5 times in a row" not in process.stderr.readline():
            assert process.poll() is None
        with Client(endpoint[1], reconnect_timeout=60) as client:
            assert client.generate("go on", max_tokens=3, seed=1).token_ids
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_up_told_to_stop_lets_a_request_end_and_a_second_signal_cuts_it(tmp_path: Path) -> None:
    with up(tmp_path, *SIM) as process:
        endpoint = re.search(r"scheduler +(\S+)", read_until_up(process))
        assert endpoint is not None
        assert process.stderr is not None
        with Client(endpoint[1], reconnect_timeout=0) as client:
            stream = client.stream("go on", max_tokens=100)
            next(stream)
            process.send_signal(signal.SIGTERM)
            for _ in stream:
                pass
            assert len(stream.result.token_ids) == 100
        assert process.wait(60) == 0
        assert "finishing 1 request(s)" in process.stderr.read()

    with up(tmp_path, *SIM) as process:
        endpoint = re.search(r"scheduler +(\S+)", read_until_up(process))
        assert endpoint is not None
        assert process.stderr is not None
        with Client(endpoint[1], reconnect_timeout=0) as client:
            stream = client.stream("go on", max_tokens=4_000)
            next(stream)
            process.send_signal(signal.SIGINT)
            while "finishing" not in process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert "1 request(s) were cut before their end" in process.stderr.read()
            stream.close()


def test_up_serves_metrics_of_every_process_unless_told_not_to(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--no-metrics") as process:
        assert "metrics" not in read_until_up(process)
    with up(tmp_path, *SIM) as process:
        said = read_until_up(process)
        pages = re.findall(r"metrics +(http://127\.0\.0\.1:\d+/metrics)", said)
        assert len(pages) == 2
        for page, name in zip(pages, (b"octavo_request_arrivals", b"octavo_worker_"), strict=True):
            with urllib.request.urlopen(page, timeout=20) as answer:  # noqa: S310 # ours
                assert name in answer.read()


def test_up_port_in_use_prints_the_childs_own_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with up(tmp_path, *SIM[:-4], "--port", str(port), "--worker-port", "0") as process:
            _, error = process.communicate(timeout=60)

    assert process.returncode == 1
    assert re.search(rf"octavo: error: scheduler ended with exit code \d+: .*{port}.*in use", error)


def test_up_missing_model_folder_prints_the_childs_own_words(tmp_path: Path) -> None:
    with up(
        tmp_path, *NO_GATEWAY, "--model", str(tmp_path / "nothing-here"), "--port", "0", "--worker-port", "0"
    ) as process:
        _, error = process.communicate(timeout=120)

    assert process.returncode == 1
    assert re.search(r"octavo: error: worker-0 ended with exit code 3: .*nothing-here", error)


def test_up_wrong_argument_of_a_worker_is_told_at_once(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--worker-arg=--max-num-seqs=0") as process:
        _, error = process.communicate(timeout=60)

    assert process.returncode == 1
    assert re.search(r"worker-0 ended with exit code 2: .*max_num_seqs", error)


def test_up_with_a_standby_names_both_and_lets_a_request_end(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--standby") as process:
        said = read_until_up(process)
        endpoints = re.findall(r"^  (?:scheduler|standby) +(\S+)$", said, re.MULTILINE)
        assert f"--endpoint {','.join(endpoints)}" in said
        first, second = endpoints
        with Client(second) as client:
            statuses = client.watch_status(0.1)
            # It asks the worker, and is told who has it.
            held = next(one for one in statuses if one.workers and one.workers[0].held_by_endpoint)
            assert (held.rank, held.workers[0].held_by_endpoint) == (1, first)
        with Client(endpoints, reconnect_timeout=0) as client:
            stream = client.stream("go on", max_tokens=300, ignore_eos=True)
            next(stream)
            process.send_signal(signal.SIGTERM)
            for _ in stream:
                pass
            assert len(stream.result.token_ids) == 300
        assert process.wait(60) == 0


def test_up_says_what_the_grace_of_its_services_has_cut(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--scheduler-arg=--drain-grace-s=1") as process:
        endpoint = re.search(r"scheduler +(\S+)", read_until_up(process))
        assert endpoint is not None
        with Client(endpoint[1], reconnect_timeout=0) as client:
            stream = client.stream("go on", max_tokens=4_000)
            next(stream)
            process.send_signal(signal.SIGTERM)

            assert process.wait(60) == 0
            assert process.stderr is not None
            assert "1 request(s) were cut before their end" in process.stderr.read()
            stream.close()


@pytest.mark.model
def test_up_serves_several_models_each_by_workers_of_its_own(tmp_path: Path) -> None:
    with up(tmp_path, *SIM, "--model", "demo") as process:
        said = read_until_up(process)
        endpoint = re.search(r"scheduler +(\S+)", said)
        assert endpoint is not None
        assert len(re.findall(r"worker-\d +127", said)) == 2
        with Client(endpoint[1]) as client:
            names = [model.id for model in client.models()]
            assert sorted(names) == ["SmolLM2-135M-Instruct", "sim"]
            for name in names:
                assert len(client.generate("hello", model=name, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_up_behind_a_proxy_reaches_its_own_processes(tmp_path: Path) -> None:
    """Nobody listens on the port of discard."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    with up(tmp_path, *SIM, env=proxies) as process:
        endpoint = re.search(r"scheduler +(\S+)", read_until_up(process))
        assert endpoint is not None
        port = endpoint[1].rpartition(":")[2]
        for target in (f"ipv4:127.0.0.1:{port}", f"dns:localhost:{port}", f"localhost:{port}"):
            told = subprocess.run(
                [*OCTAVO, "status", "--endpoint", target],
                check=False,
                env={**os.environ, **proxies},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (told.returncode, told.stderr) == (0, "")
