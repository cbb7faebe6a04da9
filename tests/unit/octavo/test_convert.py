"""What goes out as protobuf comes back as the same record, and what no sender should send is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.protocol import convert, steps
from octavo.protocol.convert import ProtocolError
from octavo.sampling import SamplingParams, StructuredOutput
from octavo.v1 import common_pb2, worker_pb2

OK = worker_pb2.STEP_STATUS_OK
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = st.floats(0, width=32, allow_nan=False)
copies = st.builds(steps.TierCopies, u64, u64, u64, f32, f32)
handles = st.integers(1, 2**64 - 1)
text = st.text(max_size=20)
key = st.binary(min_size=16, max_size=16)
keys = st.lists(key, max_size=4, unique=True).map(tuple)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


structured = st.one_of(
    st.builds(StructuredOutput, json_schema=text),
    st.builds(StructuredOutput, regex=text),
    st.builds(StructuredOutput, grammar=text),
    st.builds(StructuredOutput, choice=st.lists(text, max_size=3).map(tuple)),
    st.builds(StructuredOutput, json_object=st.booleans()),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.none() | floats(0, 2),
    top_p=st.none() | floats(0.0625, 1),
    top_k=st.none() | st.integers(0, 2**31 - 1),
    min_p=st.none() | floats(0, 1),
    repetition_penalty=st.none() | floats(0.5, 2),
    presence_penalty=st.none() | floats(-2, 2),
    frequency_penalty=st.none() | floats(-2, 2),
    seed=st.none() | u64,
    logit_bias=st.dictionaries(u32, floats(-100, 100), max_size=3),
    min_tokens=st.none() | st.integers(0, 10),
    max_tokens=st.none() | st.integers(10, 2**31 - 1),
    ignore_eos=st.none() | st.booleans(),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple),
    stop_token_ids=st.lists(u32, max_size=3).map(tuple),
    n=st.none() | st.integers(1, 128),
    logprobs=st.none() | st.integers(0, 20),
    structured=st.none() | structured,
    allowed_token_ids=st.lists(u32, max_size=3).map(tuple),
    bad_words=st.lists(st.text("abc", min_size=1, max_size=8), max_size=3).map(tuple),
    bad_words_token_ids=st.lists(st.lists(u32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    include_stop_str_in_output=st.none() | st.booleans(),
    logprob_token_ids=st.lists(u32, max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


@st.composite
def admits(draw: st.DrawFn) -> tuple[steps.Admit, ...]:
    return tuple(
        steps.Admit(
            handle=handle,
            token_ids=(token_ids := draw(st.lists(u32, min_size=1, max_size=40).map(tuple))),
            prompt_len=draw(st.integers(1, len(token_ids))),
            sampling=draw(sampling),
            choice=draw(st.integers(0, 127)),
            keys=draw(keys),
            reserve_tokens=draw(st.none() | u32),
            hold_after_finish=draw(st.booleans()),
            priority=draw(st.sampled_from(steps.Priority)),
            adapter=draw(st.none() | text),
            score_from=draw(st.none() | st.integers(1, 2**32 - 1)),
            pooling=draw(st.none() | st.sampled_from(steps.Pooling)),
        )
        for handle in sorted(draw(st.sets(handles, max_size=3)))
    )


plans = st.builds(
    steps.Plan,
    step=handles,
    admit=admits(),
    prefill=st.dictionaries(handles, st.integers(1, 2**32 - 1), max_size=4).map(lambda d: tuple(d.items())),
    skip=st.sets(handles, max_size=4).map(tuple),
    seal=st.lists(st.tuples(handles, u32, key), max_size=3).map(tuple),
    release=st.sets(handles, max_size=4).map(tuple),
    resume_after=st.none() | u64,
)


@st.composite
def logprobs(draw: st.DrawFn) -> steps.TokenLogprobs:
    tops = draw(st.lists(st.tuples(u32, floats(-100, 0)), max_size=3))
    return steps.TokenLogprobs(
        draw(u32),
        draw(floats(-100, 0)),
        draw(u32),
        tuple(token_id for token_id, _ in tops),
        tuple(logprob for _, logprob in tops),
    )


@st.composite
def reports(draw: st.DrawFn) -> steps.Report:
    counts = draw(st.lists(st.integers(1, 4), max_size=5))
    one_each = draw(st.booleans())
    if one_each:
        counts = [1] * len(counts)
    total = sum(counts)
    return steps.Report(
        step=draw(u64),
        status=draw(st.sampled_from(steps.StepStatus)),
        pool=draw(st.builds(steps.PoolReport, *[u32] * 6, u64, u32, *[u64] * 4, st.none() | copies)),
        live_count=draw(u32),
        digest=draw(u64),
        token_handles=tuple(draw(st.lists(u64, min_size=len(counts), max_size=len(counts)))),
        token_counts=() if one_each else tuple(counts),
        first_positions=tuple(draw(st.lists(u32, min_size=len(counts), max_size=len(counts)))),
        token_ids=tuple(draw(st.lists(u32, min_size=total, max_size=total))),
        logprobs=draw(st.dictionaries(u64, st.lists(logprobs(), max_size=2).map(tuple), max_size=2)),
        prompt_logprobs=draw(
            st.dictionaries(u64, st.tuples(u32, st.lists(logprobs(), max_size=2).map(tuple)), max_size=2)
        ),
        embeddings=draw(st.dictionaries(u64, st.lists(floats(-1, 1), max_size=3).map(tuple), max_size=2)),
        finished=draw(
            st.lists(
                st.builds(
                    steps.Finished,
                    u64,
                    st.sampled_from([one for one in steps.FinishReason if one]),
                    st.none() | u32,
                ),
                max_size=2,
            ).map(tuple)
        ),
        stalled=draw(st.lists(st.tuples(u64, st.sampled_from(steps.StallReason)), max_size=2).map(tuple)),
        refused=draw(
            st.lists(
                st.builds(steps.Refused, u64, st.sampled_from(steps.RefuseReason), text), max_size=2
            ).map(tuple)
        ),
        admitted=draw(st.lists(st.builds(steps.Admitted, u64, u32, u32), max_size=2).map(tuple)),
        released=draw(st.lists(u64, max_size=3).map(tuple)),
        prefilled=draw(st.lists(st.tuples(u64, u32), max_size=3).map(tuple)),
        key_events=draw(st.builds(steps.KeyEvents, keys, keys, keys, keys)),
        timing=draw(st.builds(steps.StepTiming, *[u32] * 6, u64)),
        errors=draw(
            st.lists(
                st.builds(steps.StepError, st.lists(u64, max_size=2).map(tuple), text, text), max_size=2
            ).map(tuple)
        ),
        simulated=draw(st.booleans()),
    )


@given(sampling)
def test_sampling_round_trip_is_lossless(record: SamplingParams) -> None:
    wire = convert.sampling_to_proto(record).SerializeToString()
    assert convert.sampling_from_proto(common_pb2.SamplingParams.FromString(wire)) == record


@given(plans)
def test_plan_round_trip_is_lossless(record: steps.Plan) -> None:
    wire = convert.plan_to_proto(record).SerializeToString()
    assert convert.plan_from_proto(worker_pb2.Plan.FromString(wire)) == record


@given(reports())
def test_report_round_trip_is_lossless(record: steps.Report) -> None:
    wire = convert.report_to_proto(record).SerializeToString()
    assert convert.report_from_proto(worker_pb2.Report.FromString(wire)) == record


@given(
    st.builds(steps.Geometry, st.integers(1, 512), st.integers(1, 2**32 - 1), u32, u64, st.booleans(), u32)
)
def test_geometry_round_trip_is_lossless(record: steps.Geometry) -> None:
    assert convert.geometry_from_proto(convert.geometry_to_proto(record)) == record


@given(st.binary(max_size=400))
def test_plan_from_noise_is_read_or_refused_and_nothing_else(noise: bytes) -> None:
    message = worker_pb2.Plan()
    try:
        message.ParseFromString(noise)
    except Exception:  # noqa: BLE001 - what the protobuf runtime refuses never reaches us
        return
    with contextlib.suppress(ProtocolError):
        convert.plan_from_proto(message)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        (steps.Priority, common_pb2.Priority),
        (steps.Pooling, common_pb2.Pooling),
        (steps.FinishReason, common_pb2.FinishReason),
        (steps.StepStatus, worker_pb2.StepStatus),
        (steps.StallReason, worker_pb2.StallReason),
        (steps.RefuseReason, worker_pb2.RefuseReason),
    ],
)
def test_enum_has_the_names_and_numbers_of_the_proto(kind: Any, prefix: Any) -> None:
    wire = {name: number for name, number in prefix.items() if number}
    known = [member for member in kind if member.value]
    assert list(wire.values()) == [member.value for member in known]
    assert all(name.endswith(f"_{member.name}") for name, member in zip(wire, known, strict=True))


def admit(**changes: object) -> worker_pb2.Admit:
    message = worker_pb2.Admit(handle=1, token_ids=[1, 2, 3], prompt_len=3)
    message.MergeFrom(worker_pb2.Admit(**changes))  # type: ignore[arg-type]
    return message


@pytest.mark.parametrize(
    ("field", "plan"),
    [
        ("step", worker_pb2.Plan()),
        ("prefill_tokens", worker_pb2.Plan(step=1, prefill_handles=[1, 2], prefill_tokens=[5])),
        ("prefill_tokens", worker_pb2.Plan(step=1, prefill_handles=[1], prefill_tokens=[0])),
        ("prefill_handles", worker_pb2.Plan(step=1, prefill_handles=[1, 1], prefill_tokens=[5, 5])),
        ("skip", worker_pb2.Plan(step=1, skip=[3, 3])),
        ("release", worker_pb2.Plan(step=1, release=[0])),
        ("seal.key", worker_pb2.Plan(step=1, seal=[worker_pb2.Seal(handle=1, key=b"short")])),
        ("admit.handle", worker_pb2.Plan(step=1, admit=[admit(handle=2), admit(handle=1)])),
        ("admit.handle", worker_pb2.Plan(step=1, admit=[admit(), admit()])),
        ("admit.prompt_len", worker_pb2.Plan(step=1, admit=[admit(prompt_len=4)])),
        ("admit.prompt_len", worker_pb2.Plan(step=1, admit=[worker_pb2.Admit(handle=1)])),
        ("admit.keys", worker_pb2.Plan(step=1, admit=[admit(keys=b"x" * 17)])),
        ("admit.keys", worker_pb2.Plan(step=1, admit=[admit(keys=b"x" * 16 + b"y" * 16 + b"x" * 16)])),
        ("admit.priority", worker_pb2.Plan(step=1, admit=[admit(priority=9)])),
        (
            "admit.sampling.top_p",
            worker_pb2.Plan(step=1, admit=[admit(sampling=common_pb2.SamplingParams(top_p=float("nan")))]),
        ),
        (
            "structured.kind",
            worker_pb2.Plan(
                step=1,
                admit=[admit(sampling=common_pb2.SamplingParams(structured=common_pb2.StructuredOutput()))],
            ),
        ),
    ],
)
def test_plan_malformed_is_refused_naming_the_field(field: str, plan: worker_pb2.Plan) -> None:
    with pytest.raises(ProtocolError) as caught:
        convert.plan_from_proto(plan)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "report"),
    [
        ("status", worker_pb2.Report(step=1)),
        ("first_positions", worker_pb2.Report(status=OK, token_handles=[1], token_ids=[5])),
        (
            "token_ids",
            worker_pb2.Report(status=OK, token_handles=[1], first_positions=[4], token_ids=[5, 6]),
        ),
        (
            "token_counts",
            worker_pb2.Report(
                status=OK,
                token_handles=[1],
                first_positions=[4],
                token_counts=[3],
                token_ids=[5, 6],
            ),
        ),
        ("prefilled_tokens", worker_pb2.Report(status=OK, prefilled_handles=[1])),
        (
            "key_events.stored",
            worker_pb2.Report(status=OK, key_events=worker_pb2.KeyEvents(stored=b"x")),
        ),
        (
            "finished.reason",
            worker_pb2.Report(status=OK, finished=[worker_pb2.FinishedSequence(handle=1)]),
        ),
    ],
)
def test_report_malformed_is_refused_naming_the_field(field: str, report: worker_pb2.Report) -> None:
    with pytest.raises(ProtocolError) as caught:
        convert.report_from_proto(report)
    assert caught.value.field == field


def test_report_with_a_lone_surrogate_in_an_error_still_goes_out() -> None:
    report = steps.Report(
        step=1,
        status=steps.StepStatus.FAILED,
        pool=steps.PoolReport(1, 0, 0),
        live_count=0,
        digest=0,
        errors=(steps.StepError((), "EXCEPTION", "bad \udc80 name"),),
    )
    assert convert.report_from_proto(convert.report_to_proto(report)).errors[0].message == "bad ? name"


def siblings(count: int, prompt_tokens: int) -> steps.Plan:
    """Choices of one request, each with output of its own, after a request of somebody else."""
    prompt = tuple(range(prompt_tokens))
    prompt_keys = tuple(number.to_bytes(16, "little") for number in range(prompt_tokens // 16))
    sampling = SamplingParams(seed=1, max_tokens=8)
    other = steps.Admit(1, (7, *prompt[1:]), prompt_tokens, sampling)
    choices = [
        steps.Admit(
            handle=2 + choice,
            token_ids=prompt + (choice,) * choice,
            prompt_len=prompt_tokens,
            sampling=sampling,
            choice=choice,
            keys=prompt_keys + ((bytes([choice]) * 16),) * (choice % 2),
        )
        for choice in range(count)
    ]
    return steps.Plan(1, admit=(other, *choices))


@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 5000])
def test_plan_of_many_choices_comes_back_as_it_was(prompt_tokens: int) -> None:
    plan = siblings(6, prompt_tokens)
    sent = convert.plan_to_proto(plan).SerializeToString()
    assert convert.plan_from_proto(worker_pb2.Plan.FromString(sent)) == plan


def test_prompt_of_many_choices_is_sent_once() -> None:
    sizes = {count: convert.plan_to_proto(siblings(count, 5000)).ByteSize() for count in (1, 128)}
    assert sizes[128] < 2 * sizes[1]


def test_admission_that_shares_what_is_not_there_is_an_error() -> None:
    message = convert.plan_to_proto(siblings(2, 100))
    message.admit[2].prompt_of = 99
    with pytest.raises(ProtocolError, match="prompt_of"):
        convert.plan_from_proto(message)
    message.admit[2].prompt_of = 2
    message.admit[2].shared_keys = 1000
    with pytest.raises(ProtocolError, match="shared_keys"):
        convert.plan_from_proto(message)


def test_sampling_of_many_choices_is_sent_once_to_a_worker_that_understands_that() -> None:
    sampling = SamplingParams(logit_bias=dict.fromkeys(range(1000), 0.5), stop_token_ids=tuple(range(900)))
    admits = [steps.Admit(n, (1, 2, 3), 3, sampling, choice=n - 1) for n in range(1, 129)]
    plan = steps.Plan(1, admit=tuple(admits))

    once, each = (convert.plan_to_proto(plan, share_sampling=share) for share in (True, False))

    assert once.ByteSize() < each.ByteSize() / 50
    for sent in (once, each):
        received = convert.plan_from_proto(worker_pb2.Plan.FromString(sent.SerializeToString()))
        assert received == plan
    assert len({id(admit.sampling) for admit in convert.plan_from_proto(once).admit}) == 1


def test_admission_with_the_sampling_of_one_that_is_not_there_is_an_error() -> None:
    message = convert.plan_to_proto(siblings(2, 100))
    message.admit[2].sampling_of = 99
    with pytest.raises(ProtocolError, match="sampling_of"):
        convert.plan_from_proto(message)
