"""`octavo explain` names what made a request slow: it is slowed in known ways, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo.cli.main import main
from octavo.protocol.keys import chain
from octavo.protocol.steps import KEY_BYTES, Priority
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo_lab.sim import SimCell, SimWorkerConfig

from scheduler_svc.core import CoreConfig, NewRequest
from scheduler_svc.core.overload import OverloadConfig
from scheduler_svc.planlog import PlanLogWriter, RecordingCore
from scheduler_svc.planlog.account import TimeAccount
from scheduler_svc.planlog.explain_command import account_of, headline

ROOT = bytes(KEY_BYTES)


class Scene:
    """A cell with a plan log, and requests that come when a test says so."""

    def __init__(
        self, path: Path, workers: int = 1, config: dict[str, Any] | None = None, **room: Any
    ) -> None:
        room = {"max_num_seqs": 4, "num_blocks": 512, "max_model_len": 4096, **room}
        self.path = path
        self.core = RecordingCore(CoreConfig(**(config or {})), PlanLogWriter(path))
        self.cell = SimCell(
            self.core,
            [
                SimWorkerConfig(worker_id=f"w{index}", step_times=StepTimes.builtin(), **room)
                for index in range(workers)
            ],
        )
        self._count = 0

    def ask(self, name: str, at: float, prompt: int = 40, tokens: int = 20, **fields: Any) -> None:
        """Have a request come; prompts of the same tenant begin alike."""
        self._count += 1
        ids = (
            [*range(prompt)]
            if fields.pop("alike", False)
            else [self._count * 5000 + i for i in range(prompt)]
        )
        sampling = SamplingParams(
            n=fields.pop("choices", 1), seed=self._count, max_tokens=tokens, ignore_eos=True
        )
        spec = NewRequest(
            request_id=name,
            model="sim",
            prompt_token_ids=ids,
            sampling=sampling,
            prompt_keys=tuple(chain(ROOT, ids, 16)),
            root_key=ROOT,
            **{"tenant": "mine", **fields},
        )
        self.cell.submit_at(at, spec)

    def explain(self, name: str = "slow", until: float = 120.0) -> TimeAccount:
        """Let everything end, and read the log."""
        self.cell.loop.run(until=until)
        self.core.close()
        account, story = account_of(self.path, name)
        ended = [line.at_s for line in story.lines if line.what in ("finished", "refused")]
        parts_s = sum(part.seconds for part in account.parts if part.hold.kind != "delivery")
        assert parts_s == pytest.approx(ended[-1], abs=1e-6)
        assert sum(part.seconds for part in account.parts) == pytest.approx(account.total_s, abs=1e-9)
        return account


def long_prompt(scene: Scene) -> None:
    scene.ask("long", 1.0, prompt=3000, tenant="papers")
    for index in range(3):
        scene.ask(f"short-{index}", 1.0, prompt=8, tokens=2, tenant="papers")
    scene.ask("slow", 1.05, prompt=900)


def flood(scene: Scene) -> None:
    for index in range(60):
        scene.ask(f"flood-{index}", 1.0, tokens=60, tenant="flood")
    scene.ask("slow", 1.1)


def higher_class(scene: Scene) -> None:
    for index in range(60):
        scene.ask(f"urgent-{index}", 1.0, tokens=60, tenant="mine", priority=Priority.INTERACTIVE)
    scene.ask("slow", 1.1, priority=Priority.STANDARD)


def own_requests(scene: Scene) -> None:
    for index in range(60):
        scene.ask(f"before-{index}", 1.0, tokens=60)
    scene.ask("slow", 1.1)


def no_place(scene: Scene) -> None:
    for index in range(4):
        scene.ask(f"long-{index}", 1.0, tokens=900, tenant="writers")
    scene.ask("slow", 1.5)


def no_memory(scene: Scene) -> None:
    scene.ask("large", 1.0, prompt=1000, tokens=190, tenant="books")
    scene.ask("slow", 1.6, prompt=400)


def cold_prefix(scene: Scene) -> None:
    scene.ask("slow", 1.0, prompt=3000, tokens=2)


def cached_prefix(scene: Scene) -> None:
    scene.ask("first", 1.0, prompt=3000, tokens=2, alike=True)
    scene.ask("slow", 20.0, prompt=3000, tokens=2, alike=True)


def preempted(scene: Scene) -> None:
    scene.ask("slow", 1.0, prompt=300, tokens=100, priority=Priority.BATCH)
    for index in range(8):
        scene.ask(f"urgent-{index}", 1.5, prompt=200, tokens=200, priority=Priority.INTERACTIVE)


def moved(scene: Scene) -> None:
    scene.ask("slow", 1.0, prompt=1500, tokens=30)
    host = scene.cell.hosts["w0"]
    scene.cell.loop.at(1.75, host.crash)


def draining(scene: Scene) -> None:
    host = scene.cell.hosts["w0"]
    scene.ask("long", 0.5, tokens=900)
    scene.cell.loop.at(1.0, host.drain)
    scene.ask("slow", 1.2)


def absent_adapter(scene: Scene) -> None:
    scene.ask("slow", 1.0, adapter="legal")
    scene.ask("other", 1.5)
    scene.cell.loop.at(30.0, lambda: scene.cell.cancel("slow"))


def slow_reader(scene: Scene) -> None:
    scene.ask("slow", 1.0)
    scene.cell.loop.at(20.0, lambda: scene.cell.perform(scene.core.delivered("slow", scene.cell.loop.now)))


def no_worker(scene: Scene) -> None:
    scene.cell.loop.at(0.5, scene.cell.hosts["w0"].crash)
    scene.ask("slow", 1.0)


SMALL = {"num_blocks": 80, "max_model_len": 1200}
WAYS: list[tuple[Callable[[Scene], None], dict[str, Any], tuple[str, str, str]]] = [
    (long_prompt, {"config": {"max_partial_prefills": 1}}, ("waiting", "prompt", "long")),
    (flood, {}, ("waiting", "tenant", "flood (standard)")),
    (higher_class, {"config": {"aging_stride": 1000}}, ("waiting", "class", "mine (interactive)")),
    (own_requests, {}, ("waiting", "own", "mine (standard)")),
    (no_place, {}, ("waiting", "places", "writers (standard)")),
    (no_memory, SMALL, ("waiting", "blocks", "books (standard)")),
    (cold_prefix, {}, ("prefill", "cold", "w0")),
    (preempted, {"num_blocks": 40, "max_model_len": 600}, ("preempted", "", "")),
    (moved, {}, ("moved", "", "w0 was lost: stream ended")),
    (draining, {}, ("waiting", "draining", "w0")),
    (absent_adapter, {}, ("waiting", "adapter", "legal")),
    (slow_reader, {}, ("delivery", "reader", "")),
    (no_worker, {}, ("waiting", "no_worker", "")),
]


@pytest.mark.parametrize(
    ("way", "setting", "expected"), WAYS, ids=lambda value: getattr(value, "__name__", "")
)
def test_request_slowed_in_a_known_way_names_the_cause(
    tmp_path: Path,
    way: Callable[[Scene], None],
    setting: dict[str, Any],
    expected: tuple[str, str, str],
) -> None:
    scene = Scene(tmp_path / "plan.log", **setting)
    way(scene)
    account = scene.explain()

    most = account.parts[0]
    found = (most.hold.kind, most.hold.cause, most.hold.who)
    assert found == expected, [(part.hold, part.seconds, part.text) for part in account.parts]


def test_a_level_that_refuses_a_request_is_named(tmp_path: Path) -> None:
    setting = {"config": {"overload": OverloadConfig(), "max_waiting_requests": 20}}
    scene = Scene(tmp_path / "plan.log", **setting)
    for index in range(60):
        scene.ask(f"flood-{index}", 1.0 + index * 0.02, tokens=400, tenant="flood")
    scene.ask("slow", 3.0, priority=Priority.BATCH)
    account = scene.explain(until=4.0)

    assert account.total_s == 0
    assert account.outcome.startswith("SHED: at level 3")


def test_a_cached_prefix_costs_no_prefill(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "plan.log")
    cached_prefix(scene)
    prefill = next(part for part in scene.explain().parts if part.hold.kind == "prefill")

    assert prefill.hold.cause == "cached"
    assert "2992 of them cached" in prefill.text


def test_explain_command_says_it_in_words_across_rotated_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.log"
    scene = Scene(path)
    scene.core.close()
    scene.core = RecordingCore(CoreConfig(), PlanLogWriter(path, max_bytes=20_000, files=50))
    scene.cell = SimCell(
        scene.core, [SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin(), max_num_seqs=4)]
    )
    flood(scene)
    scene.ask("other", 5.0)
    scene.explain("other")
    assert len(list(tmp_path.iterdir())) > 4

    assert main(["explain", "slow", "--plan-log", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mostly    requests of another tenant: flood (standard)")
    assert "ahead in the queue" in shown
    assert "first token" in shown

    assert main(["explain", "slow", "--plan-log", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parts"][0]["cause"] == "tenant"
    assert sum(part["seconds"] for part in record["parts"]) == pytest.approx(record["total_s"], abs=1e-9)

    assert main(["explain", "nobody", "--plan-log", str(path)]) == 2
    assert "no request 'nobody'" in capsys.readouterr().err


def test_request_of_several_choices_takes_as_long_as_the_one_that_ends_last(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "plan.log", max_num_seqs=2)
    scene.ask("slow", 1.0, prompt=100, tokens=50, choices=3)
    account = scene.explain()

    kinds = [part.hold.kind for part in account.parts]
    assert sorted(kinds[:2]) == ["decode", "waiting"]
    assert [headline(part) for part in account.parts if part.hold.kind == "decode"] == [
        "its output, token by token"
    ]
