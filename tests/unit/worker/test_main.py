"""How the process ends when its engine cannot go on."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import grpc.aio
import pytest
from octavo.steptimes import StepTimes
from octavo.v1 import worker_pb2 as pb
from octavo.v1 import worker_pb2_grpc
from structlog.testing import capture_logs

from worker_svc import main
from worker_svc.api.convert import describe
from worker_svc.config import WorkerSettings
from worker_svc.engine.loop import Loaded
from worker_svc.errors import DeviceLost, ModelLoadError
from worker_svc.models.progress import LoadingProgress
from worker_svc.runner.base import StepBatch, StepResult
from worker_svc.runner.sim import SimRunner, built_in_model
from worker_svc.start.load import build


class BreakingRunner(SimRunner):
    """Its first step ends it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(built_in_model(), StepTimes.builtin())
        self._error = error

    def execute(self, batch: StepBatch) -> StepResult:
        raise self._error


def settings() -> WorkerSettings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return WorkerSettings.load(
        {"listen": f"127.0.0.1:{port}", "metrics_port": "none", "num_blocks": 64, "runner": "sim"}
    )


def test_worker_says_how_many_gpus_share_its_model() -> None:
    chosen = WorkerSettings.load({"runner": "vllm", "model": "m", "tensor_parallel_size": 4})
    loaded = build(settings(), SimRunner(built_in_model(), StepTimes.builtin()))
    terms = main.WorkerProcess(chosen)._terms("w", loaded)

    assert describe(loaded.info, terms).devices == 4


async def test_worker_whose_device_is_lost_exits_non_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings()

    def load(*_: object) -> Loaded:
        return build(chosen, BreakingRunner(DeviceLost("fell off the bus")))

    monkeypatch.setattr(main, "load", load)
    with capture_logs() as logs:
        serving = asyncio.create_task(main.WorkerProcess(chosen).serve())
        async with grpc.aio.insecure_channel(chosen.server.listen) as channel:
            await channel.channel_ready()
            call = await ready_stream(channel)
            admit = pb.Admit(handle=1, token_ids=[9], prompt_len=1)
            plan = pb.Plan(step=1, admit=[admit], prefill_handles=[1], prefill_tokens=[9])
            await call.write(pb.SchedulerMessage(plan=plan))
            assert await serving == main.EXIT_FAILED
    died = [event for event in logs if event["event"] == "engine_died"]
    assert [(event["reason"], event["problem"]) for event in died] == [("DEVICE", "fell off the bus")]


async def ready_stream(channel: grpc.aio.Channel) -> Any:
    """Attach as soon as the model is loaded."""
    while True:
        call = cast("Any", worker_pb2_grpc.WorkerStub(channel)).Attach()
        hello = pb.Hello(scheduler_id="s", epoch=1, protocol_version=1, window=2)
        try:
            await call.write(pb.SchedulerMessage(hello=hello))
            if (await call.read()).welcome.last:
                return call
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            continue


async def test_worker_whose_model_cannot_be_loaded_raises_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> Loaded:
        raise ModelLoadError("model.safetensors: truncated")

    monkeypatch.setattr(main, "load", load)
    with pytest.raises(ModelLoadError, match="truncated"):
        await main.WorkerProcess(settings()).serve()


def test_run_turns_what_is_wrong_into_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> Loaded:
        raise ModelLoadError("model.safetensors: truncated")

    monkeypatch.setattr(main, "load", load)
    # Past it the process ends at once, and the tests with it.
    monkeypatch.setattr(main, "_CLOSE_S", 60.0)
    monkeypatch.setattr("octavo.service.logs.configure", lambda *_: None)
    with capture_logs() as logs:
        assert main.run(settings()) == 3
    assert {
        "event": "worker_cannot_start",
        "reason": "MODEL_LOAD",
        "problem": "model.safetensors: truncated",
    }.items() <= logs[-1].items()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_loading_is_shown(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with capture_logs() as logs, LoadingProgress(terminal=terminal) as progress:
        for percent in range(101):
            progress("reading weights", percent / 100)
        progress("building", 0.0)
    if terminal:
        assert "reading weights" in capsys.readouterr().err
        assert not logs
    else:
        shown = [(event["what"], event["percent"]) for event in logs]
        assert shown == [("reading weights", percent) for percent in (0, 25, 50, 75, 100)] + [("building", 0)]
