"""`octavo up` as a person runs it: it comes up, answers, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from octavo import Client

NO_GATEWAY = ("--gateway-port", "none")
SIM = (*NO_GATEWAY, "--model", "sim", "--worker-arg=--runner=sim", "--port", "0", "--worker-port", "0")
OCTAVO = (sys.executable, "-m", "octavo.cli.main")


@contextmanager
def up(logs: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*OCTAVO, "up", "--logs", str(logs), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        with process:
            yield process
            process.kill()
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


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_up_one_child_dies_ends_the_others_and_says_which(tmp_path: Path, victim: str) -> None:
    with up(tmp_path, *SIM) as process:
        read_until_up(process)
        children = descendants(process)
        (target,) = (
            child
            for child in children
            if "octavo._child" in child.cmdline() and child.cmdline()[5:6] == [victim]
        )
        target.kill()

        assert process.wait(30) == 1
        assert gone(children)
        assert process.stderr is not None
        assert re.search(rf"octavo: error: {victim}\S* was killed by SIGKILL\n", process.stderr.read())


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
