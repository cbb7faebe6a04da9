from __future__ import annotations

import pytest
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from tokenizers import Tokenizer

from worker_svc.runner.base import Row, SequenceData, StepBatch
from worker_svc.runner.sim import SimRunner, StepLoad, built_in_model, load_of, padded_load_of

TIMES = StepTimes.builtin()


def sequence(handle: int, tokens: int, *, seed: int = 7, choice: int = 0, done: bool = False) -> SequenceData:
    return SequenceData(
        handle, list(range(10, 10 + tokens)), tokens, SamplingParams(seed=seed), choice, prefill_done=done
    )


def runner(sleeps: list[float] | None = None, speed: float = 1.0) -> SimRunner:
    return SimRunner(built_in_model(), TIMES, speed, (sleeps if sleeps is not None else []).append)


def sampled(row: Row) -> int:
    return runner().execute(StepBatch((row,))).token_ids[row.sequence.handle]


def test_sim_token_depends_on_seed_choice_position_and_previous_token_only() -> None:
    whole = sampled(Row(sequence(1, 8), 0, 8, sample=True))
    assert sampled(Row(sequence(2, 8), 5, 3, sample=True)) == whole
    longer = sequence(3, 9)
    assert sampled(Row(longer, 0, 8, sample=True)) == whole
    other_seed = sampled(Row(sequence(1, 8, seed=8), 0, 8, sample=True))
    other_choice = sampled(Row(sequence(1, 8, choice=1), 0, 8, sample=True))
    other_position = sampled(Row(longer, 0, 9, sample=True))
    assert len({whole, other_seed, other_choice, other_position}) == 4


def test_sim_row_without_sample_yields_no_token() -> None:
    result = runner().execute(StepBatch((Row(sequence(1, 8), 0, 4, sample=False),)))
    assert result.token_ids == {}


def test_sim_step_takes_the_time_of_its_load_at_its_speed() -> None:
    batch = StepBatch(
        (Row(sequence(1, 100, done=True), 99, 1, sample=True), Row(sequence(2, 50), 10, 20, sample=False))
    )
    load = StepLoad(num_decodes=1, context_tokens=100, prefill_tokens=20, prefill_squares=800)
    assert load_of(batch) == load
    sleeps: list[float] = []
    runner(sleeps, speed=4.0).execute(batch)
    assert sleeps == [pytest.approx(TIMES.seconds(*load) / 4)]


def test_sim_padded_step_computes_every_prompt_as_long_as_the_longest() -> None:
    prompts = (Row(sequence(1, 10), 0, 10, sample=True), Row(sequence(2, 40), 0, 40, sample=True))
    as_if = tuple(Row(sequence(handle, 40), 0, 40, sample=True) for handle in (1, 2))
    assert padded_load_of(StepBatch(prompts)) == load_of(StepBatch(as_if))
    resumed = StepBatch((Row(sequence(1, 10), 4, 6, sample=True), prompts[1]))
    assert padded_load_of(resumed) == load_of(resumed)


def test_sim_never_ends_a_sequence_by_itself() -> None:
    info = built_in_model()
    drawn = {sampled(Row(sequence(1, 8, seed=seed), 0, 8, sample=True)) for seed in range(3000)}
    assert not drawn & set(info.text.eos_token_ids)
    assert len(drawn) == info.vocab_size - len(info.text.eos_token_ids)


def test_sim_refuses_what_needs_a_model() -> None:
    assert "logprobs" in (runner().supports(SamplingParams(logprobs=1)) or "")
    assert runner().supports(SamplingParams(temperature=0.7, seed=1)) is None


def test_sim_built_in_tokenizer_reads_any_text_back() -> None:
    tokenizer = Tokenizer.from_str(built_in_model().text.tokenizer_files["tokenizer.json"].decode())
    text = "Grüße, 世界 🌍\n\ttab"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert tokenizer.encode("<|im_start|>").ids == [1]
