"""What is asked before a request is tokenized: estimates, what is on its way, and whom it lets through."""

from __future__ import annotations

from typing import Any, cast

import pytest
from octavo.keys import Tenant
from octavo.service.memory import MemoryCeiling
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.load import IncomingRequest, LoadGate, TrimLimits
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.overload import Caps
from scheduler_svc.driver import CoreDriver
from scheduler_svc.fleet.models import ModelRegistry, ServedModel
from scheduler_svc.requests.messages import (
    GenerateCall,
    ResumedChoice,
    ServiceTerms,
    TextPrompt,
    generate_from_proto,
)
from scheduler_svc.requests.outbox import ClientStream, Outbox
from scheduler_svc.text.trimming import TrimSpec


class Models:
    """A registry with one model."""

    def __init__(self) -> None:
        self.model = cast("ServedModel", type("Known", (), {"id": "m"})())

    def peek(self, name: str) -> ServedModel | None:
        return self.model if name in {"", "m"} else None


class Core:
    """A driver that notes what it is asked."""

    def __init__(self) -> None:
        self.asks: list[AdmissionRequest] = []
        self.error: CoreError | None = None
        self.limits: Caps | None = None

    def refusal_for_load(self, model: str, ask: AdmissionRequest) -> CoreError | None:
        assert model == "m"
        self.asks.append(ask)
        return self.error

    def caps(self, model: str) -> Caps | None:
        return self.limits


def gate(ceiling: MemoryCeiling | None = None) -> tuple[LoadGate, Core, Models]:
    core, models = Core(), Models()
    settings = SchedulerSettings.load({"queue_timeout_standard_s": 7.0})
    made = LoadGate(
        cast("ModelRegistry", models),
        cast("CoreDriver", core),
        ceiling or MemoryCeiling(None),
        settings.queue,
    )
    return made, core, models


def incoming(load: LoadGate, message: pb.GenerateRequest, *, paced: bool = False) -> IncomingRequest:
    stream = ClientStream(cast("Outbox", None), "generate", None, None, paced)
    return load.receive(message, stream, Tenant("t"))


def ask(load: LoadGate, core: Core, message: pb.GenerateRequest) -> AdmissionRequest:
    load.refusal(incoming(load, message), 100.0)
    return core.asks[-1]


def test_request_is_asked_for_with_its_class_its_deadlines_and_about_its_tokens() -> None:
    load, core, _ = gate()
    plain = ask(load, core, pb.GenerateRequest(text="x" * 400))
    assert (plain.tenant, plain.queue_deadline, plain.ttft_deadline, plain.deadline) == (
        "t",
        107.0,
        None,
        None,
    )
    assert plain.prompt_tokens == pytest.approx(100, abs=2)
    terms = {"priority": 1, "ttft_deadline_ms": 500, "deadline_ms": 2000, "may_shed": True}
    hurried = ask(load, core, pb.GenerateRequest(tokens=pb.TokenIds(ids=range(33)), terms=terms))
    assert (hurried.queue_deadline, hurried.ttft_deadline, hurried.deadline) == (101.5, 100.5, 102.0)
    assert (hurried.prompt_tokens, hurried.may_shed) == (33, True)


def test_estimate_follows_what_prompts_turn_out_to_be() -> None:
    load, core, _ = gate()
    message = pb.GenerateRequest(text="x" * 400)
    for _ in range(100):
        pending = load.enter(incoming(load, message))
        pending.learn(400)
        pending.close()
    assert incoming(load, message).prompt_tokens == pytest.approx(400, rel=0.02)
    core.limits = Caps(prompt_tokens=64, max_tokens=16)
    assert incoming(load, message).prompt_tokens == pytest.approx(400, rel=0.02)
    trimmed = pb.GenerateRequest(text="x" * 400, terms={"may_trim": True})
    assert incoming(load, trimmed).prompt_tokens == 64


def test_what_is_being_tokenized_counts_until_it_is_with_the_core() -> None:
    load, core, _ = gate()
    message = pb.GenerateRequest(tokens=pb.TokenIds(ids=range(10)))
    first, second = load.enter(incoming(load, message)), load.enter(incoming(load, message))
    waiting = ask(load, core, message)
    assert (waiting.pending_requests, waiting.pending_tokens) == (2, 20)
    first.close()
    first.close()
    assert ask(load, core, message).pending_requests == 1
    second.close()
    assert ask(load, core, message).pending_tokens == 0


@pytest.mark.parametrize(
    ("fields", "terms", "paced"),
    [({"model": "other"}, {}, False), ({}, {"priority": 99}, False), ({}, {"priority": 3}, True)],
)
def test_request_that_is_wrong_in_itself_or_paced_is_let_through(
    fields: dict[str, Any], terms: dict[str, Any], paced: bool
) -> None:
    load, core, _ = gate()
    core.error = CoreError(Reason.QUEUE_FULL, "full")
    message = pb.GenerateRequest(text="x", terms=terms, **fields)
    assert load.refusal(incoming(load, message, paced=paced), 0.0) is None
    # A paced session is no way around the bounds for a class that says it is in a hurry.
    hurried = pb.GenerateRequest(text="x", terms={"priority": 1})
    for one in (incoming(load, pb.GenerateRequest(text="x")), incoming(load, hurried, paced=True)):
        refused = load.refusal(one, 0.0)
        assert refused is not None
        assert refused.reason == "QUEUE_FULL"


def test_only_what_may_be_trimmed_and_does_not_resume_is_cut() -> None:
    load, core, models = gate()
    core.limits = Caps(prompt_tokens=64, max_tokens=16)
    terms = ServiceTerms(may_trim=True, keep_head_tokens=3, keep_tail_tokens=5)
    call = GenerateCall("r", "", TextPrompt("x"), sampling=cast("Any", None), terms=terms)
    limits = load.limits(call, models.model)
    assert limits is not None
    assert (limits.trim.max_tokens, limits.trim.keep_head, limits.trim.keep_tail) == (64, 3, 5)
    assert limits.max_tokens == 16
    resumed = GenerateCall(
        "r", "", TextPrompt("x"), cast("Any", None), terms, resumed={0: ResumedChoice((1,), 0)}
    )
    assert load.limits(resumed, models.model) is None
    plain = GenerateCall("r", "", TextPrompt("x"), cast("Any", None))
    assert load.limits(plain, models.model) is None
    core.limits = None
    assert load.limits(call, models.model) is None


@pytest.mark.parametrize("caps", [None, Caps(prompt_tokens=64, max_tokens=16)])
def test_what_was_accepted_before_is_cut_as_it_was_then_whatever_the_load(caps: Caps | None) -> None:
    load, core, models = gate()
    core.limits = caps
    terms = {"may_trim": True, "keep_head_tokens": 3}
    accepted_as = {"prompt_tokens": 30, "clamped_max_tokens": 5}
    message = pb.GenerateRequest(text="x" * 400, terms=terms, accepted_as=accepted_as)
    assert incoming(load, message).prompt_tokens == 30
    limits = load.limits(generate_from_proto(message), models.model)
    assert limits == TrimLimits(TrimSpec(30, keep_head=3), 5)
    message.accepted_as.ClearField("clamped_max_tokens")
    limits = load.limits(generate_from_proto(message), models.model)
    assert limits == TrimLimits(TrimSpec(30, keep_head=3), None)
    message.terms.may_trim = False
    assert load.limits(generate_from_proto(message), models.model) is None


@pytest.mark.parametrize(
    ("message", "prompt_tokens"),
    [
        (pb.GenerateRequest(text="word " * 800), 1000),
        (pb.GenerateRequest(chat=pb.Chat(messages=[common_pb2.ChatMessage(content="x" * 4000)])), 1000),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[20_000] * 1000)), 1000),
    ],
)
def test_estimate_comes_from_the_size_of_the_input(message: pb.GenerateRequest, prompt_tokens: int) -> None:
    load, _, _ = gate()
    estimate = incoming(load, message).estimate
    assert (estimate.output, estimate.choices) == (None, 1)
    assert prompt_tokens <= estimate.prompt <= prompt_tokens + 5
    message.sampling.max_tokens, message.sampling.n = 7, 3
    estimate = incoming(load, message).estimate
    assert (estimate.output, estimate.choices) == (7, 3)


def test_nothing_is_taken_at_the_memory_ceiling_and_something_is_below_it() -> None:
    rss = [500]
    load, _, _ = gate(MemoryCeiling(1000, lambda: rss[0], iter(range(9)).__next__))
    assert load.no_memory() is None
    rss[0] = 1000
    error = load.no_memory()
    assert error is not None
    assert (error.reason, error.metadata["max_rss_bytes"]) == ("MEMORY_FULL", "1000")
    assert error.retry_after_s
    rss[0] = 999
    assert load.no_memory() is None
