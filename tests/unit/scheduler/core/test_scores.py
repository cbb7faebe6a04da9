"""Log probabilities of prompts through the core: each position once, whatever happens to the sequence."""

from __future__ import annotations

from octavo.protocol.keys import chain
from octavo.protocol.steps import Admit, Pooling, TokenLogprobs
from octavo.sampling import SamplingParams

from scheduler_svc.core.effects import Effect, EmitEmbedding, EmitPromptLogprobs
from scheduler_svc.core.events import NewRequest
from tests.unit.scheduler.core.desk import BLOCK, ROOT, Desk, worker

PROMPT = list(range(100, 100 + 5 * BLOCK))
SCORES = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in PROMPT)


def submit(desk: Desk, name: str, **fields: object) -> None:
    scored = fields.pop("scored", True)
    sampling = SamplingParams(n=1, seed=1, max_tokens=2, prompt_logprobs=1 if scored else None)
    spec = NewRequest(
        request_id=name,
        model="sim",
        prompt_token_ids=PROMPT,
        sampling=sampling,
        prompt_keys=tuple(chain(ROOT, PROMPT, BLOCK)),
        root_key=ROOT,
        **fields,  # type: ignore[arg-type]
    )
    desk.monitor.submitted(spec, desk.now)
    desk._perform(desk.core.submit(spec, desk.now))


def admission(desk: Desk, worker_id: str = "w0") -> Admit:
    (admit,) = [admit for plan in desk.plans[worker_id] for admit in plan.admit]
    return admit


def told(effects: list[Effect]) -> list[int]:
    return [
        effect.first_position + offset
        for effect in effects
        if isinstance(effect, EmitPromptLogprobs)
        for offset in range(len(effect.logprobs))
    ]


def report(desk: Desk, first: int, end: int, worker_id: str = "w0") -> list[Effect]:
    """Deliver a report of the next step in which these positions were scored."""
    handle = desk.sequence("r").binding.handle
    made = desk.run(worker_id)
    made.prompt_logprobs[handle] = (first, SCORES[first:end])
    return desk.report(worker_id, made)


def test_positions_are_told_once_and_a_new_worker_goes_on_behind_them() -> None:
    desk = Desk(worker(max_num_batched_tokens=2 * BLOCK), window=1)
    submit(desk, "r")
    assert admission(desk).score_from == 1
    assert told(report(desk, 1, 20)) == list(range(1, 20))
    assert told(report(desk, 10, 25)) == list(range(20, 25)), "some were told before"
    machine = desk.workers["w0"]
    desk.lose()
    desk.attach(type(machine)(machine.config))
    assert admission(desk).score_from == 25
    desk.finish()


def test_gap_between_positions_ends_the_stream_of_the_worker() -> None:
    desk = Desk(worker(max_num_batched_tokens=2 * BLOCK), window=1)
    submit(desk, "r")
    report(desk, 1, 9)
    assert not told(report(desk, 10, 12))
    assert [one.worker_id for one in desk.detached] == ["w0"]


def test_prompt_that_is_told_already_is_scored_no_more() -> None:
    desk = Desk(worker())
    submit(desk, "r", scored_tokens=len(PROMPT))
    assert admission(desk).score_from is None
    desk.finish()


def test_what_is_to_be_scored_or_averaged_is_not_expected_from_the_cache() -> None:
    desk = Desk(worker())
    submit(desk, "first", scored=False)
    desk.finish()
    pool, state = desk.core._models["sim"].pool, desk.state()
    for name, fields, cached in (
        ("plain", {"scored": False}, 4 * BLOCK),
        ("scored", {}, 0),
        ("half", {"scored_tokens": 2 * BLOCK + 1}, 2 * BLOCK),
        ("mean", {"scored": False, "pooling": Pooling.MEAN}, 0),
        ("last", {"scored": False, "pooling": Pooling.LAST}, 4 * BLOCK),
    ):
        submit(desk, name, **fields)  # type: ignore[arg-type]
        assert pool.cached_tokens(state, desk.sequence(name)) == cached, name
        desk.cancel(name)
        desk.finish()


def test_vector_is_told_before_the_end() -> None:
    desk = Desk(worker())
    submit(desk, "r", scored=False, pooling=Pooling.MEAN)
    assert admission(desk).pooling is Pooling.MEAN
    made = desk.run()
    made.embeddings[desk.sequence("r").binding.handle] = (0.6, 0.8)
    assert EmitEmbedding("r", (0.6, 0.8)) in desk.report("w0", made)
    desk.finish()
