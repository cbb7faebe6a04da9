"""Plans as a scheduler makes them, with all that can happen to a sequence, for an engine over a real model.

Tests and the scorecard run the same jobs through runners, disturbed or not, and compare what comes out.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from octavo.protocol.keys import chain, root_key
from octavo.protocol.steps import (
    Admit,
    FinishReason,
    Plan,
    Pooling,
    Report,
    StepStatus,
    TokenLogprobs,
)
from octavo.sampling import SamplingParams

from worker_svc.engine.loop import StepEngine
from worker_svc.kv.errors import require

ALL: Final = 1 << 30
NEAR_TIE: Final = 1e-3
"""Two logits so close may change places from one way of adding to another."""
Phase = Literal["waiting", "prefill", "decode"]


@dataclass(eq=False, slots=True)
class EngineJob:
    """What a client wants, and how far it is."""

    prompt: list[int]
    sampling: SamplingParams
    choice: int = 0
    cancel_in: Phase | None = None
    pooling: Pooling | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens of the prompt from the second one on."""
    embedding: tuple[float, ...] = ()
    num_left: int = 0
    """Tokens to prefill."""
    num_sealed: int = 0
    ended: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def score_from(self) -> int | None:
        """Index of the first token of its prompt that is to be scored, if any is."""
        first = len(self.prompt_logprobs) + 1
        return first if self.sampling.prompt_logprobs is not None and first < len(self.prompt) else None

    @property
    def phase(self) -> Phase:
        """Where it is, once it is on the worker."""
        if not self.num_left:
            return "decode"
        return "waiting" if self.num_left == len(self.tokens) else "prefill"


class PlanWorkload:
    """Runs jobs on one engine that has no sequences yet, `max_num_seqs` at the same time.

    `block_size` is that of its memory; None names no content, so that nothing is found in a cache. `seed` is
    of all chance; what has another seed shares no cached prefix.
    """

    def __init__(self, engine: StepEngine, block_size: int | None, max_num_seqs: int, seed: int = 0) -> None:
        self._max_num_seqs = max_num_seqs
        self._engine = engine
        self._block_size = block_size
        self._random = random.Random(seed)
        self._root = root_key("workload", "", str(seed), block_size or 1, b"")
        self._steps, self._handles = itertools.count(1), itertools.count(1)
        self._asked: dict[int, EngineJob] = {}
        """The job of each handle that was ever admitted."""
        self.seen: Counter[str] = Counter()
        """What came to pass, and how often."""

    def run(self, jobs: Sequence[EngineJob], *, disturb: bool, most: int = 48) -> None:
        """Run until every job has ended, with its output and logprobs; nothing is left on the engine then.

        With `disturb`, chunks (of `most` tokens at most), skips, preemptions and arrivals are random.
        """
        waiting = list(jobs)
        live: dict[int, EngineJob] = {}
        while waiting or live:
            plan = self._plan(waiting, live, disturb=disturb, most=most)
            self._read(self._engine.run_step(plan, time.perf_counter), waiting, live)
        self._engine.run_step(Plan(next(self._steps)), time.perf_counter)
        require("nothing is left", self._engine.num_live == 0, self._engine.num_live)

    def _plan(
        self, waiting: list[EngineJob], live: dict[int, EngineJob], *, disturb: bool, most: int
    ) -> Plan:
        chance = self._random.random
        release = []
        for handle, job in live.items():
            if job.cancel_in == job.phase:
                job.ended = FinishReason.CANCELLED
                self.seen[f"cancelled in {job.phase}"] += 1
                release.append(handle)
            elif disturb and len(live) > 1 and chance() < 0.02:
                self.seen[f"preempted in {job.phase}"] += 1
                waiting.append(job)
                release.append(handle)
        room = self._max_num_seqs - (len(live) - len(release))
        if disturb and live:
            room = min(room, self._random.randint(0, 4))
        admits = [self._admit(job) for job in waiting[:room]]
        going = {handle: job for handle, job in live.items() if handle not in release}
        chunks = [
            (handle, self._random.randint(1, most) if disturb else ALL)
            for handle, job in going.items()
            if job.num_left and not (disturb and chance() < 0.2)
        ]
        if not disturb:
            chunks += [(admit.handle, ALL) for admit in admits]
        decoding = [handle for handle, job in going.items() if not job.num_left]
        skip = [handle for handle in decoding if disturb and chance() < 0.1]
        self.seen["skips"] += len(skip)
        self.seen["mixed steps"] += bool(chunks and decoding)
        seals = tuple(self._seals(live))
        return Plan(next(self._steps), tuple(admits), tuple(chunks), tuple(skip), seals, tuple(release))

    def _admit(self, job: EngineJob) -> Admit:
        handle, keys = next(self._handles), self._keys(job)
        job.num_sealed, self._asked[handle] = len(keys), job
        return Admit(
            handle,
            job.tokens,
            len(job.prompt),
            job.sampling,
            job.choice,
            tuple(keys),
            score_from=job.score_from,
            pooling=job.pooling,
        )

    def _keys(self, job: EngineJob) -> list[bytes]:
        return chain(self._root, job.tokens, self._block_size) if self._block_size else []

    def _seals(self, live: dict[int, EngineJob]) -> list[tuple[int, int, bytes]]:
        seals = []
        for handle, job in live.items():
            keys = self._keys(job)
            seals += [(handle, index, keys[index]) for index in range(job.num_sealed, len(keys))]
            job.num_sealed = len(keys)
        return seals

    def _read(self, report: Report, waiting: list[EngineJob], live: dict[int, EngineJob]) -> None:
        require("steps succeed", report.status is StepStatus.OK, report.errors)
        for admitted in report.admitted:
            job = live[admitted.handle] = self._asked[admitted.handle]
            waiting.remove(job)
            job.num_left = len(job.tokens) - admitted.cached_tokens - admitted.host_cached_tokens
            self.seen["resumed"] += bool(job.output)
            self.seen["prefix hits"] += bool(admitted.cached_tokens)
            self.seen["host hits"] += bool(admitted.host_cached_tokens)
        self.seen["refused"] += len(report.refused)
        for handle in report.released:
            del live[handle]
        for handle, num_tokens in report.prefilled:
            live[handle].num_left -= num_tokens
        for handle, (first, scores) in report.prompt_logprobs.items():
            job = live[handle]
            require("each token of a prompt is scored once", first == len(job.prompt_logprobs) + 1, first)
            job.prompt_logprobs += scores
        for handle, vector in report.embeddings.items():
            live[handle].embedding = vector
        for handle, token_id in zip(report.token_handles, report.token_ids, strict=True):
            live[handle].output.append(token_id)
            live[handle].logprobs.extend(report.logprobs.get(handle, ()))
        for finished in report.finished:
            live.pop(finished.handle).ended = finished.reason


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy decoding as transformers does it; `model` is one of its causal language models, in float32."""

    model: Any

    def mismatches(self, job: EngineJob) -> tuple[int, int]:
        """Return how many tokens of a greedy job the model would not have chosen: (unexcused, excused).

        Each is judged after the tokens before it, and excused when its logit is a NEAR_TIE with the best.
        """
        import torch  # noqa: PLC0415 - heavy

        if not job.output:
            return 0, 0
        with torch.inference_mode():
            logits = self.model(torch.tensor([job.tokens[:-1]])).logits[0, len(job.prompt) - 1 :]
        chosen = torch.tensor(job.output)
        gaps = logits.amax(dim=-1) - logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
        wrong = logits.argmax(dim=-1) != chosen
        return int((wrong & (gaps >= NEAR_TIE)).sum()), int((wrong & (gaps < NEAR_TIE)).sum())


def greedy_jobs(vocab_size: int, count: int, longest: int, max_tokens: int, seed: int = 0) -> list[EngineJob]:
    """Return jobs with random prompts, of which some share a prefix and some are cancelled."""
    chooser = random.Random(seed)
    shared = [chooser.randrange(3, vocab_size) for _ in range(longest // 2)]
    phases: tuple[Phase, ...] = ("waiting", "prefill", "decode")
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    jobs = []
    for number in range(count):
        own = [chooser.randrange(3, vocab_size) for _ in range(chooser.randint(1, longest // 2))]
        cancel_in = phases[number // 5 % 3] if number % 5 == 4 else None
        jobs.append(EngineJob([*shared, *own] if number % 3 == 0 else own, sampling, cancel_in=cancel_in))
    return jobs
