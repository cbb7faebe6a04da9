"""Every runner over one model: the same plans give the tokens that transformers would choose."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.protocol.steps import FinishReason, Pooling
from octavo.sampling import SamplingParams, StructuredOutput
from octavo_lab.scorecard.runner_workload import EngineJob, PlanWorkload, Reference, greedy_jobs
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.unit.worker.runner.torch.families import VOCAB_SIZE, save_model, small_llama
from worker_svc.config import WorkerSettings
from worker_svc.engine.engine import EngineConfig, WorkerEngine
from worker_svc.errors import StepOutOfMemory
from worker_svc.grammar.backend import Vocabulary
from worker_svc.grammar.guide import Grammars
from worker_svc.runner.base import LoadedModel, ModelRunner
from worker_svc.start.load import load_runner

BLOCK_SIZE = 32
NUM_BLOCKS = 96
NUM_HOST_BLOCKS = 64
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 128
CONTEXT = 512
EOS = 2
RANDOM = SamplingParams(
    temperature=1.3,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=5,
    max_tokens=24,
    ignore_eos=True,
)
RUNNERS = [
    "torch",
    # vLLM warns about itself while it is imported.
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]),
]


@dataclass
class Subject:
    runner: ModelRunner
    info: LoadedModel
    reference: Reference

    def workload(
        self,
        seed: int = 0,
        num_blocks: int = NUM_BLOCKS,
        num_host_blocks: int = 0,
        grammars: Grammars | None = None,
    ) -> PlanWorkload:
        """Return a workload over a new engine with an empty cache; its pool may be a part of the memory."""
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=CONTEXT,
            eos_token_ids=self.info.text.eos_token_ids,
            num_host_blocks=num_host_blocks,
            check_integrity=True,
        )
        return PlanWorkload(
            WorkerEngine(self.runner, config, grammars=grammars), BLOCK_SIZE, MAX_NUM_SEQS, seed
        )

    def run(self, *jobs: EngineJob, seed: int = 0, disturb: bool = False) -> list[list[int]]:
        self.workload(seed).run(jobs, disturb=disturb)
        return [job.output for job in jobs]

    def run_one(self, prompt: list[int], **sampling: object) -> EngineJob:
        chosen: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
        job = EngineJob(list(prompt), SamplingParams(**chosen))  # type: ignore[arg-type]
        self.run(job)
        return job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(small_llama(CONTEXT), folder)


@pytest.fixture(scope="module", params=RUNNERS)
def subject(request: pytest.FixtureRequest, model: tuple[Path, PreTrainedModel]) -> Iterator[Subject]:
    folder, reference = model
    settings = WorkerSettings.load(
        {
            "model": str(folder),
            "runner": request.param,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            **({"enforce_eager": True} if request.param == "vllm" else {"device": "cpu"}),
        }
    )
    runner = load_runner(settings, lambda what, fraction: None)
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS)
    yield Subject(runner, runner.info, Reference(reference))
    runner.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.slow
def test_runner_64_disturbed_sequences_match_transformers(subject: Subject) -> None:
    jobs = greedy_jobs(VOCAB_SIZE, count=64, longest=240, max_tokens=24, seed=1)
    workload = subject.workload(seed=1)

    workload.run(jobs, disturb=True)

    verdicts = [subject.reference.mismatches(job) for job in jobs]
    assert sum(unexcused for unexcused, _ in verdicts) == 0
    complete = [job for job in jobs if job.ended is not FinishReason.CANCELLED]
    assert all(len(job.output) == 24 and job.ended is FinishReason.LENGTH for job in complete)
    for event in (
        "mixed steps",
        "skips",
        "prefix hits",
        "resumed",
        "preempted in prefill",
        "preempted in decode",
        "cancelled in waiting",
        "cancelled in prefill",
        "cancelled in decode",
    ):
        assert workload.seen[event], f"the workload never had: {event}"


@pytest.mark.slow
def test_runner_pool_too_small_for_all_still_matches_transformers(subject: Subject) -> None:
    jobs = greedy_jobs(VOCAB_SIZE, count=24, longest=240, max_tokens=24, seed=2)
    workload = subject.workload(seed=2, num_blocks=24)

    workload.run(jobs, disturb=True)

    assert workload.seen["refused"]
    assert all(subject.reference.mismatches(job)[0] == 0 for job in jobs)


@pytest.mark.slow
def test_runner_out_of_memory_after_all_was_computed_changes_no_token(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real memory runs out anywhere in a step; what was computed before must not count twice."""
    runner: Any = subject.runner
    owner, name = (runner._engine, "step") if subject.info.runner == "vllm" else (runner, "_step")
    compute = getattr(owner, name)
    chance = random.Random(4)
    failures = 0

    def run_out(*arguments: object) -> object:
        nonlocal failures
        result = compute(*arguments)
        if chance.random() < 0.1:
            failures += 1
            raise StepOutOfMemory("injected")
        return result

    monkeypatch.setattr(owner, name, run_out)
    jobs = greedy_jobs(VOCAB_SIZE, count=24, longest=240, max_tokens=24, seed=5)
    subject.workload(seed=5).run(jobs, disturb=True)

    assert failures >= 5
    assert all(subject.reference.mismatches(job)[0] == 0 for job in jobs)


def test_runner_blocks_back_from_host_hold_what_they_held(subject: Subject) -> None:
    prompts = [prompt(160, seed) for seed in range(8)]
    workload = subject.workload(num_blocks=20, num_host_blocks=NUM_HOST_BLOCKS)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for tokens in prompts:
        workload.run([EngineJob(tokens, sampling)], disturb=False)

    again = [EngineJob(tokens, sampling) for tokens in prompts]
    for job in again:
        workload.run([job], disturb=False)

    assert workload.seen["host hits"]
    assert all(subject.reference.mismatches(job)[0] == 0 for job in again)


@pytest.mark.slow
def test_runner_seeded_sampling_disturbed_gives_the_undisturbed_tokens(subject: Subject) -> None:
    def jobs() -> list[EngineJob]:
        return [
            EngineJob(prompt(20 + 9 * number, number), replace(RANDOM, seed=number // 2), choice=number % 2)
            for number in range(20)
        ]

    alone = [subject.run(job)[0] for job in jobs()]
    workload = subject.workload(seed=3)
    disturbed = jobs()
    workload.run(disturbed, disturb=True, most=16)

    assert [job.output for job in disturbed] == alone
    assert workload.seen["resumed"]
    assert workload.seen["preempted in prefill"]


def test_runner_choices_of_one_seed_differ(subject: Subject) -> None:
    first, second = subject.run(*[EngineJob(prompt(30), RANDOM, choice=choice) for choice in range(2)])

    assert first != second


@pytest.mark.slow
def test_runner_draws_follow_the_models_distribution(
    subject: Subject, model: tuple[Path, PreTrainedModel]
) -> None:
    tokens = prompt(40, seed=8)
    count = 2000
    jobs = [
        EngineJob(tokens, SamplingParams(temperature=1.5, seed=seed, max_tokens=1, ignore_eos=True))
        for seed in range(count)
    ]

    drawn = Counter(output[0] for output in subject.run(*jobs))

    with torch.inference_mode():
        probabilities = (model[1](torch.tensor([tokens])).logits[0, -1] / 1.5).softmax(dim=-1)
    for share, token in zip(*(values.tolist() for values in probabilities.topk(5)), strict=True):
        deviation = (share * (1 - share) / count) ** 0.5
        assert drawn[token] / count == pytest.approx(share, abs=4.5 * deviation)


def test_runner_prompt_beyond_the_token_budget_runs_whole_when_alone(subject: Subject) -> None:
    job = subject.run_one(prompt(300))

    assert MAX_NUM_BATCHED_TOKENS < 300
    assert subject.reference.mismatches(job)[0] == 0


def test_runner_context_is_filled_to_its_last_token(subject: Subject) -> None:
    job = subject.run_one(prompt(CONTEXT - 3), max_tokens=100)

    assert len(job.tokens) == CONTEXT
    assert job.ended is FinishReason.LENGTH


def test_runner_logit_bias_decides_the_token(subject: Subject) -> None:
    job = subject.run_one(prompt(10), logit_bias={77: 100.0})

    assert job.output == [77] * 12


def test_runner_min_tokens_keeps_stop_tokens_away(subject: Subject) -> None:
    free = subject.run_one(prompt(10))
    stops = tuple(set(free.output))

    job = subject.run_one(prompt(10), stop_token_ids=stops, min_tokens=6)

    assert not set(stops) & set(job.output[:6])
    assert len(job.output) >= 7 or job.ended is FinishReason.LENGTH


def test_runner_stop_tokens_outside_the_vocabulary_do_no_harm(subject: Subject) -> None:
    free = subject.run_one(prompt(10))

    job = subject.run_one(prompt(10), stop_token_ids=(VOCAB_SIZE + 7,), min_tokens=6)

    assert job.output == free.output


def test_runner_top_k_of_one_is_greedy(subject: Subject) -> None:
    greedy = subject.run_one(prompt(40))

    job = subject.run_one(prompt(40), temperature=2.0, top_k=1, seed=9)

    assert job.output == greedy.output


def test_runner_repetition_penalty_sees_the_prompt_and_presence_penalty_does_not(subject: Subject) -> None:
    prompts = (prompt(150, seed) for seed in range(20))
    tokens = next(tokens for tokens in prompts if subject.run_one(tokens, max_tokens=1).output[0] in tokens)
    plain = subject.run_one(tokens, max_tokens=1)

    present = subject.run_one(tokens, max_tokens=1, presence_penalty=2.0)
    repeated = subject.run_one(tokens, max_tokens=1, repetition_penalty=1000.0)

    assert present.output == plain.output
    assert repeated.output != plain.output


def test_runner_logprobs_are_the_models_own(subject: Subject, model: tuple[Path, PreTrainedModel]) -> None:
    job = subject.run_one(prompt(20), logprobs=3, logit_bias={5: 1.0}, presence_penalty=1.0)

    with torch.inference_mode():
        logits = model[1](torch.tensor([job.tokens[:-1]])).logits[0, 19:]
    expected = logits.log_softmax(dim=-1)
    assert len(job.logprobs) == len(job.output)
    for row, (token, entry) in enumerate(zip(job.output, job.logprobs, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-3)
        assert entry.rank == int((expected[row] > expected[row, token] + 1e-6).sum()) + 1
        assert entry.top_logprobs == pytest.approx(expected[row].topk(3).values.tolist(), abs=1e-3)


def test_runner_unasked_logprobs_stay_away_beside_rows_that_asked(subject: Subject) -> None:
    asked = EngineJob(
        prompt(20, 1), SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    )
    silent = EngineJob(prompt(20, 2), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))

    subject.run(asked, silent)

    assert len(asked.logprobs) == 4
    assert asked.logprobs[0].top_token_ids == ()
    assert silent.logprobs == []


def test_runner_end_of_sequence_token_ends_a_sequence(subject: Subject) -> None:
    job = subject.run_one(prompt(10), ignore_eos=False, logit_bias={EOS: 100.0})

    assert job.output == [EOS]
    assert job.ended is FinishReason.STOP


def test_runner_output_follows_its_constraint_and_a_disturbance_changes_none_of_it(subject: Subject) -> None:
    text = subject.info.text
    tokenizer = text.tokenizer_files["tokenizer.json"].decode()
    grammars = Grammars(Vocabulary(tokenizer, subject.info.vocab_size, text.eos_token_ids))
    wanted = StructuredOutput(regex="(yes|no){8}!{2,9}")
    sampling = replace(RANDOM, structured=wanted, max_tokens=60)

    def outputs(*, disturb: bool) -> list[list[int]]:
        jobs = [EngineJob(prompt(40, seed), replace(sampling, seed=seed)) for seed in range(6)]
        jobs.append(EngineJob(prompt(40, 9), replace(RANDOM, max_tokens=30)))
        subject.workload(grammars=grammars).run(jobs, disturb=disturb)
        return [job.output for job in jobs]

    try:
        undisturbed = outputs(disturb=False)
        assert outputs(disturb=True) == undisturbed
    finally:
        grammars.close()
    for output in undisturbed[:-1]:
        assert output[-1] == EOS
        assert re.fullmatch(wanted.regex or "", Tokenizer.from_str(tokenizer).decode(output[:-1]))


def scoring(length: int, seed: int, **sampling: object) -> EngineJob:
    chosen: dict[str, object] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, **sampling}
    return EngineJob(prompt(length, seed), SamplingParams(prompt_logprobs=3, **chosen))  # type: ignore[arg-type]


def check_scores(job: EngineJob, model: PreTrainedModel) -> None:
    """Compare what is said of a job's prompt with what transformers say."""
    with torch.inference_mode():
        expected = model(torch.tensor([job.prompt])).logits[0].log_softmax(dim=-1)
    assert [entry.token_id for entry in job.prompt_logprobs] == job.prompt[1:]
    for row, entry in enumerate(job.prompt_logprobs):
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(expected[row].topk(3).values.tolist(), abs=1e-3)
        better = (expected[row] > expected[row, entry.token_id] + 1e-3).sum().item()
        near = (expected[row] >= expected[row, entry.token_id] - 1e-3).sum().item()
        assert better + 1 <= entry.rank <= near + 1


def test_runner_prompt_logprobs_are_the_models_own_at_the_borders_of_chunks_too(
    subject: Subject, model: tuple[Path, PreTrainedModel]
) -> None:
    jobs = [scoring(60 + 17 * number, number) for number in range(6)]
    subject.workload(seed=11).run(jobs, disturb=True, most=16)

    for job in jobs:
        check_scores(job, model[1])
        assert subject.reference.mismatches(job)[0] == 0


def test_runner_prompt_logprobs_after_preemptions_miss_and_repeat_nothing(
    subject: Subject, model: tuple[Path, PreTrainedModel]
) -> None:
    workload = subject.workload(seed=12, num_blocks=24)
    jobs = [scoring(200, number % 4) for number in range(12)]
    workload.run(jobs, disturb=True, most=24)

    assert workload.seen["preempted in prefill"]
    for job in jobs:
        check_scores(job, model[1])


def test_runner_prompt_logprobs_of_a_cached_prompt_are_all_there(
    subject: Subject, model: tuple[Path, PreTrainedModel]
) -> None:
    workload = subject.workload(seed=13)
    first, again, plain = scoring(160, 5), scoring(160, 5), EngineJob(prompt(160, 5), RANDOM)
    for job in (first, again, plain):
        workload.run([job], disturb=False)

    check_scores(again, model[1])
    assert workload.seen["prefix hits"] == 1, "it uses no cached block, but leaves them for others"


@pytest.mark.parametrize("pooling", Pooling)
def test_runner_vectors_are_those_of_the_hidden_states(
    subject: Subject, model: tuple[Path, PreTrainedModel], pooling: Pooling
) -> None:
    workload = subject.workload(seed=14, num_blocks=24)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    jobs = [EngineJob(prompt(120 + number % 3, number % 3), sampling, pooling=pooling) for number in range(9)]
    workload.run(jobs, disturb=True, most=24)

    for job in jobs:
        with torch.inference_mode():
            hidden = model[1](torch.tensor([job.prompt]), output_hidden_states=True).hidden_states[-1][0]
        vector = hidden[-1] if pooling is Pooling.LAST else hidden.mean(dim=0)
        assert job.embedding == pytest.approx((vector / vector.norm()).tolist(), abs=1e-4)


def test_runner_only_allowed_tokens_are_sampled(subject: Subject) -> None:
    job = subject.run_one(prompt(10), allowed_token_ids=(40, 41, 42), temperature=2.0, seed=1)

    assert set(job.output) <= {40, 41, 42}
    assert len(set(job.output)) > 1


def test_runner_bad_words_stay_away_and_only_they(subject: Subject) -> None:
    free = subject.run_one(prompt(10)).output
    banned = ((free[0],), (free[3], free[4], free[5]))

    job = subject.run_one(prompt(10), bad_words_token_ids=banned)

    assert free[0] not in job.output
    whole = subject.run_one(prompt(10), bad_words_token_ids=banned[1:]).output
    assert whole[:5] == free[:5]
    assert whole[5] != free[5]


def test_runner_where_nothing_may_be_sampled_the_request_fails_and_no_other(subject: Subject) -> None:
    neighbour = EngineJob(prompt(30, 1), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    hostile = EngineJob(
        prompt(10),
        SamplingParams(temperature=1.0, seed=1, allowed_token_ids=(7,), bad_words_token_ids=((7,),)),
    )

    subject.run(neighbour, hostile)

    assert hostile.ended is FinishReason.ERROR
    assert neighbour.ended is FinishReason.LENGTH
    assert subject.reference.mismatches(neighbour)[0] == 0


def test_runner_logprobs_of_named_tokens_beside_rows_that_want_the_best(
    subject: Subject, model: tuple[Path, PreTrainedModel]
) -> None:
    named = EngineJob(
        prompt(20, 1),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprob_token_ids=(9, 4)),
    )
    best = EngineJob(
        prompt(20, 2), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    )
    subject.run(named, best)

    for job in (named, best):
        with torch.inference_mode():
            expected = model[1](torch.tensor([job.tokens[:-1]])).logits[0, 19:].log_softmax(dim=-1)
        for row, entry in enumerate(job.logprobs):
            ids = [9, 4] if job is named else expected[row].topk(2).indices.tolist()
            assert entry.logprob == pytest.approx(expected[row, job.output[row]].item(), abs=1e-3)
            assert list(entry.top_token_ids) == ids
            assert entry.top_logprobs == pytest.approx(expected[row, ids].tolist(), abs=1e-3)
