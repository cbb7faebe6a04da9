"""A plan log says what the core was told and planned, survives what befalls it, and replays."""

from __future__ import annotations

import gzip
import inspect
import io
import itertools
import json
import os
import resource
import stat
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.cli.main import main
from octavo.protocol.steps import KEY_BYTES, Geometry, Pooling, PoolReport, Priority
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo.v1 import planlog_pb2
from octavo_lab.sim import SimCell, SimWorkerConfig
from octavo_lab.sim.chaos import CHAOS_CONFIG, Chaos

from scheduler_svc.core import (
    CoreConfig,
    Effect,
    FinishChoice,
    LogEvent,
    NewRequest,
    SchedulerCore,
    StaticConfig,
    WorkerInfo,
)
from scheduler_svc.core.overload import OverloadConfig
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.planlog import (
    PlanLogError,
    PlanLogReader,
    PlanLogWriter,
    RecordingCore,
    RequestStory,
    checkpoint,
    replay,
)
from scheduler_svc.planlog.convert import (
    config_from_json,
    config_to_json,
    request_from_proto,
    request_to_proto,
    worker_from_proto,
    worker_to_proto,
)
from scheduler_svc.planlog.writer import FRAME, MAGIC

DATA = Path(__file__).parent / "data"
OVERLOADED = CoreConfig(step_watchdog_s=2.0, max_waiting_requests=40, overload=OverloadConfig())
NOT_LOGGED = {
    "ahead_of",
    "caps",
    "explain_to",
    "find",
    "level_of",
    "next_wakeup",
    "queue_position",
    "refusal_for_load",
    "snapshot",
}
"""Methods of the core that decide nothing."""


def request(number: int, prompt_tokens: int = 60, max_tokens: int = 20) -> NewRequest:
    return NewRequest(
        request_id=f"r{number}",
        model="sim",
        prompt_token_ids=tuple(range(prompt_tokens)),
        sampling=SamplingParams(n=1, seed=number, max_tokens=max_tokens, temperature=0.7),
    )


def record(
    path: Path,
    requests: list[NewRequest],
    *,
    max_bytes: int = 1 << 30,
    files: int = 100,
    num_blocks: int = 16,
) -> None:
    """Run requests on one small worker, all of them at once."""
    worker = SimWorkerConfig(
        worker_id="w0",
        step_times=StepTimes.builtin(),
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_model_len=256,
    )
    with recording(path, max_bytes=max_bytes, files=files) as core:
        cell = SimCell(core, [worker])
        for number, spec in enumerate(requests):
            cell.submit_at(1.0 + number * 1e-3, spec)
        cell.loop.run(until=60.0)


@contextmanager
def recording(path: Path, config: CoreConfig | None = None, **limits: int) -> Iterator[RecordingCore]:
    """A core whose log is closed in the end."""
    core = RecordingCore(config or CoreConfig(), PlanLogWriter(path, **limits))
    try:
        yield core
    finally:
        core.close()


class Order:
    """Observes in which order requests end."""

    def __init__(self) -> None:
        self.finished: list[str] = []

    def before(self, core: SchedulerCore, entry: planlog_pb2.PlanLogEntry) -> None:
        """Nothing."""

    def passed_over(self) -> None:
        """Nothing."""

    def after(self, core: SchedulerCore, entry: planlog_pb2.PlanLogEntry, effects: list[Effect]) -> None:
        self.finished += [one.request_id for one in effects if isinstance(one, FinishChoice)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "plan.log"
    record(path, [request(number) for number in range(8)])
    return path


# Recording


def test_recording_core_logs_every_call_that_decides_something() -> None:
    calls = {name for name, _ in inspect.getmembers(SchedulerCore, inspect.isfunction) if name[0] != "_"}
    assert calls - NOT_LOGGED <= set(vars(RecordingCore))


def test_recording_changes_nothing_of_what_the_core_does(tmp_path: Path) -> None:
    with recording(tmp_path / "plan.log", CHAOS_CONFIG) as core:
        with_log = Chaos(core, seed=5).run(800)
    without = Chaos(SchedulerCore(CHAOS_CONFIG), seed=5).run(800)
    assert (with_log.outcomes, with_log.tokens) == (without.outcomes, without.tokens)


def test_plan_log_is_for_its_owner_only(log: Path) -> None:
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_plan_log_of_an_earlier_scheduler_is_kept_aside(log: Path) -> None:
    before = log.read_bytes()
    record(log, [request(99)])
    assert log.with_name("plan.log.1").read_bytes() == before
    assert replay(log).events["submit"] == 1


def test_plan_log_that_rotates_keeps_so_many_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.log"
    record(path, [request(number) for number in range(40)], max_bytes=4096, files=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.log", "plan.log.1", "plan.log.2"]


def test_plan_log_that_cannot_be_written_any_more_stops_and_the_core_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with recording(folder / "plan.log", max_bytes=1) as core:
        core.submit(request(1), 1.0)
        (folder / "plan.log").unlink()
        folder.rmdir()
        events = [effect for effect in core.submit(request(2), 2.0) if isinstance(effect, LogEvent)]
        assert [event.name for event in events] == ["plan_log_stopped"]
        assert not [effect for effect in core.submit(request(3), 3.0) if isinstance(effect, LogEvent)]
        assert core.snapshot(3.0).arrivals == 3


def test_plan_log_goes_on_when_it_can_be_written_again_and_says_what_is_missing(tmp_path: Path) -> None:
    path, full = tmp_path / "plan.log", resource.getrlimit(resource.RLIMIT_FSIZE)
    seen: list[LogEvent] = []

    def told(effects: list[Effect]) -> None:
        seen.extend(effect for effect in effects if isinstance(effect, LogEvent))

    with recording(path) as core:
        told(core.submit(request(1), 1.0))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, full[1]))
            for number in range(2, 6):
                told(core.submit(request(number), float(number)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, full)
        assert (core.plan_log.entries_missed, "File too large" in str(core.plan_log.problem)) == (4, True)
        told(core.submit(request(6), 60.0))
        told(core.cancel("r2", 61.0))
        assert (core.plan_log.entries_missed, core.plan_log.problem) == (4, None)
    assert [event.name for event in seen] == ["plan_log_stopped", "plan_log_resumed"]
    assert seen[1].fields["entries_missed"] == 4
    before, after = replay(path.with_name("plan.log.1")), replay(path)
    assert (before.events, before.gap, before.torn_bytes) == ({"submit": 1}, None, 10)
    assert (after.events, after.differs) == ({"submit": 1, "cancel": 1}, False)
    assert after.gap is not None
    assert (after.gap.since, after.gap.entries) == (2.0, 4)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.log", "plan.log.1"]


def test_plan_log_that_is_tried_again_in_vain_destroys_no_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.log"
    record(path, [request(number) for number in range(8)], max_bytes=4096, files=3)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with recording(path, max_bytes=1, files=3) as core:
        core.submit(request(1), 1.0)
        kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))
            for now in range(2, 500):
                core.tick(float(now))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept


def test_plan_log_that_cannot_be_started_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(PlanLogError, match="nowhere"):
        RecordingCore(CoreConfig(), PlanLogWriter(tmp_path / "nowhere" / "plan.log"))


def test_call_that_raises_is_the_last_entry_and_raises_again_in_the_replay(tmp_path: Path) -> None:
    with recording(tmp_path / "plan.log") as core:
        core.submit(request(1), 1.0)
        with pytest.raises(IndexError):
            core.stop_choice("r1", 7, 2.0)
    result = replay(tmp_path / "plan.log")
    assert result.raised is not None
    assert result.raised.startswith("IndexError")
    assert not result.differs


# Replay


@pytest.mark.parametrize(
    "config", [CHAOS_CONFIG, OVERLOADED, *(CoreConfig(policy=policy) for policy in POLICIES)]
)
def test_replay_of_a_faulty_run_makes_the_same_plans(tmp_path: Path, config: CoreConfig) -> None:
    with recording(tmp_path / "plan.log", config, max_bytes=64 << 10, files=1000) as core:
        steps = Chaos(core, seed=11).run(1000).steps
    results = [replay(file) for file in tmp_path.iterdir()]
    assert len(results) > 2
    assert sum(result.plans for result in results) >= steps
    assert not any(result.differs for result in results)


def test_replay_of_the_static_arm_makes_the_same_plans(tmp_path: Path) -> None:
    worker = SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin(), paged=False)
    with recording(tmp_path / "plan.log", CoreConfig(static=StaticConfig(batch_size=3))) as core:
        cell = SimCell(core, [worker])
        for number in range(7):
            cell.submit_at(1.0 + 0.1 * number, request(number, prompt_tokens=10 * number + 1))
        cell.loop.run(until=60.0)
    result = replay(tmp_path / "plan.log")
    assert result.plans > 20
    assert not result.differs


def test_replay_knows_the_weights_of_tenants_at_each_moment(tmp_path: Path) -> None:
    path = tmp_path / "plan.log"
    worker = SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin(), num_blocks=64, max_num_seqs=1)
    admitted: list[list[str]] = []
    for weights in ({"b": 9.0}, {"a": 9.0}):
        with recording(path, CoreConfig(policy="fair", max_waiting_requests=1000)) as core:
            cell = SimCell(core, [worker])
            core.weigh_tenants({"a": 9.0}, 0.0)
            for number in range(40):
                spec = replace(request(number, max_tokens=4), tenant="ab"[number % 2])
                cell.submit_at(1.0, spec)
            cell.loop.run(until=1.5)
            core.weigh_tenants(weights, 1.5)
            cell.loop.run(until=60.0)
        result = replay(path)
        assert not result.differs
        assert result.events["tenant_weights"] == 2
        story = Order()
        replay(path, story)
        admitted.append(story.finished)
    assert admitted[0] != admitted[1], "the weights make no difference, so nothing was tested"


def test_replay_does_not_depend_on_the_order_of_hashes(tmp_path: Path) -> None:
    path = tmp_path / "plan.log"
    with recording(path, CHAOS_CONFIG) as core:
        Chaos(core, seed=2).run(400)
    for seed in ("1", "2"):
        done = subprocess.run(  # our own command
            [sys.executable, "-m", "octavo.cli.main", "replay", str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        assert b"are the same, byte for byte" in done.stdout


def test_replay_of_a_compressed_log_reads_it_as_it_is(log: Path) -> None:
    zipped = log.with_suffix(".gz")
    zipped.write_bytes(gzip.compress(log.read_bytes()))
    assert replay(zipped) == replay(log)


def test_replay_of_a_log_whose_end_was_never_written_goes_as_far_as_it_is_whole(log: Path) -> None:
    whole = replay(log)
    log.write_bytes(log.read_bytes() + bytes(1000))
    result = replay(log)
    assert result.plans == whole.plans
    assert (result.torn_bytes, result.damaged_bytes) == (1000, 0)


@pytest.mark.parametrize("missing", [1, 5, 300])
def test_replay_of_a_torn_log_goes_as_far_as_it_is_whole(log: Path, missing: int) -> None:
    data = log.read_bytes()
    log.write_bytes(data[:-missing])
    result = replay(log)
    assert result.plans > 10
    assert result.torn_bytes > 0
    assert not result.damaged_bytes
    assert not result.differs


def entry_ends(log: Path) -> list[int]:
    """Where each record of a log ends."""
    reader = PlanLogReader(log)
    sizes = [FRAME.size + len(entry.SerializeToString()) for entry in (reader.header, *reader)]
    return list(itertools.accumulate(sizes, initial=len(MAGIC)))[1:]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 7, FRAME.size, FRAME.size + 5])
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_replay_of_a_damaged_log_stops_there_and_says_so(log: Path, at: int, flip: int) -> None:
    data = bytearray(log.read_bytes())
    ends = entry_ends(log)
    assert ends[-1] == len(data)
    start = ends[len(ends) // 2]
    data[start + at] ^= flip
    log.write_bytes(data)
    result = replay(log)
    assert (result.damaged_bytes, result.torn_bytes) == (len(data) - start, 0)
    assert not result.differs


def test_log_that_is_damaged_in_its_header_is_refused(log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[len(MAGIC) + FRAME.size] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(PlanLogError, match="damaged in its header"):
        replay(log)


def test_compressed_log_that_is_a_bomb_is_read_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.planlog.reader.MAX_RECORD_BYTES", 1 << 20)
    path = tmp_path / "plan.log"
    with gzip.open(path, "wb") as file:
        file.write(MAGIC + FRAME.pack(2**32 - 1, 0))
        for _ in range(100):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(PlanLogError, match="header"):
            replay(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("keep", [0.01, 0.5, 0.99])
def test_compressed_log_that_is_cut_off_is_refused(log: Path, keep: float) -> None:
    data = gzip.compress(log.read_bytes())
    log.write_bytes(data[: max(2, int(len(data) * keep))])
    with pytest.raises(PlanLogError, match="damaged compression"):
        replay(log)


def test_compressed_log_that_is_damaged_is_refused(log: Path) -> None:
    data = bytearray(gzip.compress(log.read_bytes()))
    data[-6] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(PlanLogError, match="damaged compression"):
        replay(log)


def rewritten(path: Path, change: str) -> None:
    """Change one thing in the middle of a log."""
    reader = PlanLogReader(path)
    entries = list(reader)
    middle = next(entry for entry in entries[len(entries) // 2 :] if entry.plans)
    if change == "plan":
        middle.plans[0].plan += b"\x08\x01"
    elif change == "missing":
        del middle.plans[:]
    else:
        middle.effects_crc ^= 1
    records = [reader.header.SerializeToString(), *(entry.SerializeToString() for entry in entries)]
    with path.open("wb") as file:
        file.write(MAGIC)
        for data in records:
            file.write(FRAME.pack(len(data), zlib.crc32(data)) + data)


def test_replay_finds_the_one_plan_that_differs(log: Path) -> None:
    rewritten(log, "plan")
    (mismatch,) = replay(log).mismatches
    assert mismatch.logged is not None
    assert mismatch.replayed is not None
    assert (mismatch.worker_id, mismatch.logged.step) == ("w0", 1)


def test_replay_finds_the_plan_that_was_not_sent_then(log: Path) -> None:
    rewritten(log, "missing")
    (mismatch,) = replay(log).mismatches
    assert mismatch.logged is None
    assert mismatch.replayed is not None


def test_replay_finds_other_effects_that_differ(log: Path) -> None:
    rewritten(log, "crc")
    result = replay(log)
    assert (result.mismatches, result.effect_mismatches) == ([], 1)


@pytest.mark.parametrize(
    "content", [b"", b"no plan log at all", MAGIC, MAGIC + b"\x00" * 8, MAGIC + b"\xff" * 40]
)
def test_file_that_is_no_plan_log_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.log"
    path.write_bytes(content)
    with pytest.raises(PlanLogError, match=r"plan\.log"):
        replay(path)


def test_log_of_another_format_is_refused(tmp_path: Path) -> None:
    header = planlog_pb2.PlanLogHeader(format_version=99).SerializeToString()
    path = tmp_path / "plan.log"
    path.write_bytes(MAGIC + FRAME.pack(len(header), zlib.crc32(header)) + header)
    with pytest.raises(PlanLogError, match="format 99"):
        replay(path)


# Logs of the last release


def test_replay_of_a_log_of_the_last_release_goes_on_from_the_files_before_it() -> None:
    """Made by octavo 0.1.0 (format 2): its second file begins with a pickle, which is never read."""
    first, second = replay(DATA / "format-2.log.1"), replay(DATA / "format-2.log")
    assert (first.events["submit"], first.events["report"]) == (5, 29)
    assert second.events == {"tick": 14, "report": 14}
    assert first.last_now is not None
    assert second.first_now == pytest.approx(first.last_now, abs=0.1)


def test_replay_of_a_log_of_the_last_release_without_the_files_before_it_says_what_is_wanted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.log"
    path.write_bytes((DATA / "format-2.log").read_bytes())
    with pytest.raises(PlanLogError, match=r"only octavo 0\.1\.0 reads.*plan\.log\.1"):
        replay(path)
    record(tmp_path / "plan.log.1", [request(1)], max_bytes=2000, files=1)
    with pytest.raises(PlanLogError, match=r"plan\.log\.1 is not the file before it"):
        replay(path)


# Checkpoints


def busy_core(config: CoreConfig = CHAOS_CONFIG) -> SchedulerCore:
    """A core in the middle of its work: something runs, something waits."""
    core = SchedulerCore(config)
    worker = SimWorkerConfig(
        worker_id="w0", step_times=StepTimes.builtin(), num_blocks=32, max_num_seqs=4, max_model_len=256
    )
    cell = SimCell(core, [worker])
    for number in range(12):
        spec = replace(request(number), deadline=50.0 + number, root_key=b"r" * 16, may_shed=number % 2 == 0)
        cell.submit_at(1.0, replace(spec, sampling=replace(spec.sampling, n=1 + number % 3)))
    cell.loop.run(until=1.5)
    assert core.snapshot(1.5).live_requests
    return core


@pytest.mark.parametrize(
    "config", [CHAOS_CONFIG, OVERLOADED, *(CoreConfig(policy=policy) for policy in POLICIES)]
)
def test_core_of_a_checkpoint_does_what_the_core_would_have_done(config: CoreConfig) -> None:
    core = busy_core(config)
    copy = checkpoint.load(planlog_pb2.Checkpoint.FromString(checkpoint.dump(core).SerializeToString()))
    assert copy.snapshot(2.0) == core.snapshot(2.0)
    assert repr(copy.worker_down("w0", 2.0)) == repr(core.worker_down("w0", 2.0))
    assert repr(copy.tick(3.0)) == repr(core.tick(3.0))


def test_checkpoint_that_names_anything_but_a_record_of_the_core_is_refused() -> None:
    for name in ("os.system", "builtins.eval", "scheduler_svc.core.core.heapq", "scheduler_svc.core.core"):
        message = checkpoint.dump(busy_core())
        message.classes[0].name = name
        with pytest.raises(checkpoint.CheckpointError, match="there is no"):
            checkpoint.load(message)


def test_checkpoint_of_another_version_says_what_differs() -> None:
    message = checkpoint.dump(busy_core())
    sequence = next(one for one in message.classes if one.name.endswith(".Sequence"))
    sequence.fields[-1] = "mood"
    with pytest.raises(checkpoint.CheckpointError, match="another version: Sequence differs in deaths, mood"):
        checkpoint.load(message)
    message.version = 7
    with pytest.raises(checkpoint.CheckpointError, match="layout 7, this version reads 1"):
        checkpoint.load(message)


CHECKPOINT = checkpoint.dump(busy_core())


@given(st.data())
def test_checkpoint_that_is_damaged_is_refused_or_makes_a_core(data: st.DataObject) -> None:
    message = planlog_pb2.Checkpoint()
    message.CopyFrom(CHECKPOINT)
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(["kinds", "sizes", "values"]))
        numbers = getattr(message, name)
        at = data.draw(st.integers(0, len(numbers) - 1))
        numbers[at] = data.draw(st.integers(0, 1 << 20) | st.integers(0, 2**32 - 1))
    with suppress(checkpoint.CheckpointError):
        assert isinstance(checkpoint.load(message), SchedulerCore)


def test_state_that_no_checkpoint_can_hold_is_a_gap_and_no_fault_of_the_core(tmp_path: Path) -> None:
    with recording(tmp_path / "plan.log", max_bytes=1) as core:
        core.submit(request(1), 1.0)
        core.level_of = lambda _: None  # type: ignore[assignment,method-assign,return-value]
        (stopped,) = [effect for effect in core.tick(2.0) if isinstance(effect, LogEvent)]
        assert "which no checkpoint can" in str(stopped.fields["error"])


# Conversion

u32 = st.integers(0, 2**32 - 1)
key = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
keys = st.lists(key, max_size=3).map(tuple)
tokens = st.lists(u32, max_size=5).map(tuple)
moment = st.none() | st.floats(allow_nan=False)
name = st.text(max_size=8)
requests = st.builds(
    NewRequest,
    request_id=name,
    model=name,
    prompt_token_ids=tokens,
    sampling=st.builds(SamplingParams, n=st.integers(1, 4), seed=u32, max_tokens=st.integers(1, 99)),
    priority=st.sampled_from(Priority),
    tenant=name,
    prompt_keys=keys,
    root_key=st.binary(max_size=16),
    queue_deadline=moment,
    ttft_deadline=moment,
    deadline=moment,
    resumed=st.dictionaries(st.integers(0, 3), tokens, max_size=3),
    finished_choices=st.frozensets(st.integers(0, 3)),
    paced=st.booleans(),
    adapter=st.none() | name,
    order=st.integers(-1000, 1000),
    scored_tokens=u32,
    pooling=st.none() | st.sampled_from(Pooling),
)
pools = st.builds(PoolReport, free=u32, evictable=u32, active=u32)
workers = st.builds(
    WorkerInfo,
    worker_id=name,
    incarnation=name,
    model=name,
    geometry=st.builds(Geometry, block_size=st.integers(1, 64), num_blocks=st.integers(1, 999)),
    max_num_seqs=u32,
    max_num_batched_tokens=u32,
    max_model_len=u32,
    pool=pools,
    device_keys=keys,
    host_keys=keys,
    adapters=st.lists(name, max_size=3).map(tuple),
    draining=st.booleans(),
)


@given(requests)
def test_request_comes_back_from_protobuf_as_it_was(spec: NewRequest) -> None:
    sent = request_to_proto(spec).SerializeToString()
    assert request_from_proto(planlog_pb2.SubmitEvent.FromString(sent)) == spec


@given(workers)
def test_worker_comes_back_from_protobuf_as_it_was(info: WorkerInfo) -> None:
    sent = worker_to_proto(info).SerializeToString()
    assert worker_from_proto(planlog_pb2.WorkerUpEvent.FromString(sent)) == info


def test_settings_come_back_from_json_as_they_were() -> None:
    config = CoreConfig(
        policy="fair",
        static=StaticConfig(bucket_bounds=(8, 16)),
        aging_s={Priority.INTERACTIVE: 0.1, Priority.STANDARD: 0.2, Priority.BATCH: 0.3},
        tenant_weights={"a": 2.5},
    )
    assert config_from_json(config_to_json(config)) == config


# Why a request waited


def test_story_of_a_request_that_lacked_blocks_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "plan.log"
    record(path, [request(0, 150, 60), request(1, 100, 20)])
    story = RequestStory("r1")
    replay(path, story)
    what = [line.what for line in story.lines]
    assert what == ["accepted", "waits", "admitted", "first token", "finished"]
    waited = story.lines[1]
    assert (waited.reason, waited.plans > 10) == ("blocks", True)
    assert "needs 7 blocks" in waited.why
    assert story.waited_s == pytest.approx(waited.until_s, abs=0.2)


def test_story_of_a_request_far_behind_says_who_stopped_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.log"
    record(path, [request(number, 16, 40) for number in range(30)], num_blocks=100)
    story = RequestStory("r29")
    replay(path, story)
    behind = [line for line in story.lines if line.reason == "behind"]
    assert "wait ahead; the plan stopped at r" in behind[0].why
    assert "no place: 4 of 4 sequences run" in behind[0].why


def test_story_of_a_request_without_workers_says_so(tmp_path: Path) -> None:
    with recording(tmp_path / "plan.log") as core:
        core.submit(request(1), 1.0)
        core.tick(2.0)
    story = RequestStory("r1")
    replay(tmp_path / "plan.log", story)
    assert [line.reason for line in story.lines] == ["", "no_worker"]
    assert story.waited_s is None


# octavo replay


def test_replay_command_of_a_good_log_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "8 submit" in shown
    assert "are the same, byte for byte" in shown
    assert "LONGEST WAITS" in shown


def test_replay_command_of_a_log_that_differs_fails_and_names_the_step(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(log, "plan")
    assert main(["replay", str(log)]) == 1
    assert "w0: step 1 differs" in capsys.readouterr().out


def test_replay_command_of_a_damaged_log_fails_and_says_so(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    assert main(["replay", str(log)]) == 1
    assert "the file is damaged: its last" in capsys.readouterr().out
    log.write_bytes(gzip.compress(data)[:-9])
    assert main(["replay", str(log)]) == 2
    assert capsys.readouterr().err.startswith("octavo: error: ")


def test_replay_command_explains_one_request(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--explain", "r7"]) == 0
    shown = capsys.readouterr().out
    assert "no place: 4 of 4 sequences run" in shown
    assert "finished" in shown


def test_replay_command_prints_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--json", "--explain", "r7"]) == 0
    shown = json.load(io.StringIO(capsys.readouterr().out))
    assert shown["mismatches"] == []
    assert shown["story"][0]["what"] == "accepted"


@pytest.mark.parametrize("arguments", [["nowhere.log"], ["{log}", "--explain", "r99"]])
def test_replay_command_without_such_a_thing_is_an_error_in_one_line(
    log: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(argument.format(log=log) for argument in arguments)]) == 2
    assert capsys.readouterr().err.startswith("octavo: error: ")


# Use


def test_usage_of_a_log_adds_up_to_its_time_and_says_whose_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.log"
    requests = [replace(request(number), tenant="ab"[number % 2]) for number in range(8)]
    record(path, requests, max_bytes=3000)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2

    used: dict[str, list[float]] = {}
    for file in files:
        assert main(["usage", "--plan-log", str(file), "--json"]) == 0
        for period in json.loads(capsys.readouterr().out)["periods"]:
            for one in period["tenants"]:
                counts = (one["requests"], one["prompt_tokens"], one["output_tokens"], one["device_s"])
                had = used.get(one["tenant"], [0.0] * 4)
                used[one["tenant"]] = [a + b for a, b in zip(had, counts, strict=True)]
            whole_s = period["until_unix_s"] - period["from_unix_s"]
            parts = [one["device_s"] for one in period["tenants"]]
            parts += [period["idle_device_s"], period["unassigned_device_s"]]
            assert sum(parts) == pytest.approx(whole_s, abs=0.2)

    assert [values[:3] for values in used.values()] == [[4, 240, 80], [4, 240, 80]]
    assert used["a"][3] == pytest.approx(used["b"][3], rel=0.2)


def test_usage_of_what_is_no_log_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("nothing")

    with pytest.raises(SystemExit, match="2"):
        main(["usage", "--plan-log", str(tmp_path / "text")])
    assert "is no plan log" in capsys.readouterr().err
