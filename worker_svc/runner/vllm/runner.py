"""The vLLM backend: steps of the engine as steps of vLLM's model runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from octavo.protocol.steps import TokenLogprobs
from octavo.sampling import SamplingParams

from worker_svc.errors import (
    InvalidSettings,
    NotFinite,
    NothingAllowed,
    RunnerError,
    StepFailed,
    StepOutOfMemory,
)
from worker_svc.grammar.backend import Mask
from worker_svc.models.progress import Progress
from worker_svc.runner.base import (
    BlockCopy,
    CopyTicket,
    LoadedModel,
    Row,
    SequenceData,
    StepBatch,
    StepResult,
    guided_rows,
)
from worker_svc.runner.restrictions import Restrictions
from worker_svc.runner.vllm import installed
from worker_svc.runner.vllm.readings import Reading, Readings
from worker_svc.runner.vllm.sampling import (
    EVERYTHING,
    draw_seed,
    sampling_kwargs,
    temperature_of,
    unsupported,
)
from worker_svc.runner.vllm.settings import VllmSettings, engine_args

if TYPE_CHECKING:
    from worker_svc.runner.vllm.internals import StartedRow, StepInput

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Tracked:
    """What vLLM knows of a sequence."""

    req_id: str
    num_blocks: int
    draws: bool
    restrictions: Restrictions


class VllmRunner:
    """A model in vLLM's executor.

    vLLM keeps a row of its own per sequence: it is told of a sequence when that first runs, and then of
    what was added to it. After a failed step all rows are forgotten and told anew from the sequences,
    since nobody knows how far each rank got.
    """

    def __init__(self, settings: VllmSettings, info: LoadedModel, progress: Progress) -> None:
        """Load the model.

        Args:
            settings: what to load and how.
            info: what the model's files say; the rest is filled in from vLLM.
            progress: called with what is being done.

        Raises:
            InvalidSettings: vLLM is missing or of another version, or the settings cannot work.
            ModelLoadError: the model cannot be loaded.
        """
        installed.prepare()
        from worker_svc.runner.vllm import internals  # noqa: PLC0415 - only now is the environment pinned

        self._vllm = internals
        if settings.trust_remote_code:
            log.warning(
                "trust_remote_code_is_on", model=str(settings.model), meaning="code of the model runs here"
            )
        self._settings = settings
        progress("loading the model into vLLM", 0.0)
        args = engine_args(settings, on_cpu=internals.platform_is_cpu())
        self._engine = internals.VllmEngine(args, settings.adapters)
        progress("loading the model into vLLM", 1.0)
        engine = self._engine
        self._info = replace(
            info,
            runner="vllm",
            dtype=engine.dtype,
            kv_dtype=engine.kv_dtype,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            adapters=tuple(settings.adapters),
            device=engine.device,
            num_ranks=engine.num_ranks,
        )
        self._tracked: dict[int, _Tracked] = {}
        self._finished: set[str] = set()
        self._num_started = 0
        self._num_copies = 0

    @property
    def info(self) -> LoadedModel:
        """The model's description."""
        return self._info

    def available_kv_bytes(self, utilization: float) -> int:
        """Return the bytes that KV blocks may take in each rank, from vLLM's profile."""
        return self._engine.available_kv_bytes(utilization)

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """Make the KV memory, and compile or capture what runs over it.

        Raises:
            InvalidSettings: vLLM was started with other blocks.
            MemoryError: it does not fit.
        """
        if block_size != self._settings.block_size:
            raise InvalidSettings(
                f"vLLM was started with blocks of {self._settings.block_size}, not {block_size}"
            )
        self._engine.allocate(num_blocks, num_host_blocks)
        # vLLM's context shrinks to what a small pool holds.
        self._info = replace(self._info, max_model_len=self._engine.max_model_len)
        try:
            self._warm_up()
        except StepOutOfMemory as error:
            raise MemoryError(f"beside them a first step runs out of memory: {error}") from error

    def supports(self, sampling: SamplingParams) -> str | None:
        """Return what of `sampling` cannot be done, or None."""
        problem = unsupported(sampling, self._info.vocab_size)
        if problem is None:
            try:
                self._sampling(sampling)
            except ValueError as error:
                return f"vLLM refuses the sampling parameters: {error}"
        return problem

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute one step; see `ModelRunner.execute`."""
        for handle in (*batch.removed, *(sequence.handle for sequence in batch.added)):
            self._forget(handle)
        result = StepResult({}, {})
        unguided: frozenset[int] = frozenset()
        try:
            for rows in self._parts(batch.rows):
                unguided |= self._compute(rows, result)
        except RunnerError:
            for handle in tuple(self._tracked):
                self._forget(handle)
            raise
        for handle in unguided:
            # vLLM has taken a token of it into its books.
            self._forget(handle)
        return replace(result, unguided=unguided)

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Copy blocks out."""
        self._engine.copy_out(self._pairs(copies))

    def copy_to_device(self, copies: Seq[BlockCopy]) -> CopyTicket:
        """Start to copy blocks in."""
        self._num_copies += 1
        self._engine.copy_in(self._pairs(copies), self._num_copies)
        return Ticket(self._engine, self._num_copies)

    def close(self) -> None:
        """End vLLM's ranks and give their memory back."""
        self._engine.close()

    def _parts(self, rows: Seq[Row]) -> list[Seq[Row]]:
        """Cut a step that is larger than vLLM's buffers: a prompt that runs whole may be."""
        limit = self._settings.max_num_batched_tokens
        if sum([row.num_tokens for row in rows]) <= limit:
            return [rows]
        return [(part,) for row in rows for part in _chunks(row, limit)]

    def _compute(self, rows: Seq[Row], result: StepResult) -> frozenset[int]:
        """Add what is computed to `result`; return the handles that grammars let get no token."""
        step = self._step_input(rows)
        unguided: frozenset[int] = frozenset()

        def masks() -> dict[str, Mask]:
            nonlocal unguided
            guides, unguided = guided_rows(rows)
            return {self._tracked[handle].req_id: guide.mask for handle, guide in guides.items()}

        output, readings = None, Readings()
        if step.num_scheduled_tokens or step.finished:
            guided = any(row.sample and row.sequence.guide is not None for row in rows)
            output, readings = self._engine.step(step, masks if guided else None)
            # Not before: until a step went through, vLLM may not have forgotten them.
            self._finished = set()
        self._take_read(rows, readings, result)
        kept = [row for row in rows if row.sequence.handle not in unguided]
        self._collect(kept, output, readings.named, result)
        return unguided

    def _warm_up(self) -> None:
        """Sample once in every way: what vLLM compiles at first use would stall a step for many seconds."""
        sequences = [
            SequenceData(number, [0], 1, sampling, block_table=[0])
            for number, sampling in enumerate((EVERYTHING, SamplingParams(temperature=0.0, logprobs=0)))
        ][: self._settings.max_num_seqs]
        for rows in (sequences[:1], sequences):
            self.execute(StepBatch(tuple([Row(sequence, 0, 1, sample=True) for sequence in rows])))
        self.execute(StepBatch((), removed=tuple([sequence.handle for sequence in sequences])))

    def _sampling(self, sampling: SamplingParams) -> Any:
        kwargs = sampling_kwargs(sampling, self._info.text.eos_token_ids, self._info.vocab_size)
        return self._vllm.make_sampling(kwargs)

    def _forget(self, handle: int) -> None:
        tracked = self._tracked.pop(handle, None)
        if tracked is not None:
            self._finished.add(tracked.req_id)

    def _step_input(self, rows: Seq[Row]) -> StepInput:
        started: list[StartedRow] = []
        running = self._vllm.RunningRows()
        num_scheduled: dict[str, int] = {}
        draw_seeds: dict[str, int] = {}
        wanted: dict[str, Reading] = {}
        for row in rows:
            sequence = row.sequence
            if self._is_spent(row):
                continue
            tracked = self._tracked.get(sequence.handle)
            if tracked is None:
                tracked, new_row = self._start(row)
                started.append(new_row)
            else:
                table = sequence.block_table
                new_blocks: tuple[list[int]] | None = None
                if len(table) > tracked.num_blocks:
                    new_blocks = ([block + self._vllm.NULL_BLOCKS for block in table[tracked.num_blocks :]],)
                    tracked.num_blocks = len(table)
                running.req_ids.append(tracked.req_id)
                running.new_block_ids.append(new_blocks)
                running.num_computed_tokens.append(row.start)
                running.num_output_tokens.append(sequence.num_output_tokens)
            num_scheduled[tracked.req_id] = row.num_tokens
            if row.sample and tracked.draws:
                position = row.start + row.num_tokens
                draw_seeds[tracked.req_id] = draw_seed(sequence.sampling.seed or 0, sequence.choice, position)
            if (reading := Reading.of(row)) is not None:
                wanted[tracked.req_id] = reading
        return self._vllm.StepInput(self._finished, started, running, num_scheduled, draw_seeds, wanted)

    def _start(self, row: Row) -> tuple[_Tracked, StartedRow]:
        """Return what vLLM must know of a sequence that it does not know yet.

        Request ids are never reused: a known one takes another path in vLLM.
        """
        sequence = row.sequence
        self._check(sequence)
        self._num_started += 1
        tracked = _Tracked(
            req_id=str(self._num_started),
            num_blocks=len(sequence.block_table),
            draws=temperature_of(sequence.sampling) > 0.0,
            restrictions=Restrictions(sequence, self._info.text.eos_token_ids, self._info.vocab_size),
        )
        self._tracked[sequence.handle] = tracked
        return tracked, self._vllm.StartedRow(
            req_id=tracked.req_id,
            prompt_token_ids=sequence.token_ids[: sequence.prompt_len],
            output_token_ids=sequence.token_ids[sequence.prompt_len :],
            sampling=self._sampling(sequence.sampling),
            block_ids=[block + self._vllm.NULL_BLOCKS for block in sequence.block_table],
            num_computed_tokens=row.start,
            lora=None if sequence.adapter is None else self._engine.loras[sequence.adapter],
        )

    def _check(self, sequence: SequenceData) -> None:
        """Refuse what would break the step for every row in it, while the culprit is known."""
        vocab_size = self._info.vocab_size
        if not all(0 <= token < vocab_size for token in sequence.token_ids):
            raise StepFailed(f"a token id is outside the vocabulary of {vocab_size}", (sequence.handle,))
        if sequence.adapter is not None and sequence.adapter not in self._engine.loras:
            raise StepFailed(f"there is no adapter {sequence.adapter}", (sequence.handle,))

    def _is_spent(self, row: Row) -> bool:
        """Return whether a finished row that is held fills the context: vLLM has no room for its token."""
        return row.sequence.held and row.start + row.num_tokens >= self._info.max_model_len

    def _take_read(self, rows: Seq[Row], readings: Readings, result: StepResult) -> None:
        """Add what was read beside the sampled tokens; a row may have been computed in parts."""
        for row in rows if readings.prompt_logprobs or readings.pooled else ():
            handle = row.sequence.handle
            tracked = self._tracked.get(handle)
            if tracked is None:
                continue
            if entries := readings.prompt_logprobs.get(tracked.req_id):
                result.prompt_logprobs.setdefault(handle, []).extend(entries)
            if pooled := readings.pooled.get(tracked.req_id):
                before = result.pooled.get(handle)
                result.pooled[handle] = list(map(add, before, pooled)) if before else pooled

    def _collect(
        self,
        rows: Seq[Row],
        output: Any,
        named_logprobs: Mapping[str, tuple[float, ...]],
        result: StepResult,
    ) -> None:
        """Add the sampled tokens of `rows` to `result`."""
        bad: list[int] = []
        empty: list[int] = []
        for row in rows:
            if not row.sample:
                continue
            sequence = row.sequence
            if self._is_spent(row):
                result.token_ids[sequence.handle] = sequence.token_ids[-1]
                continue
            tracked = self._tracked[sequence.handle]
            index = output.req_id_to_index[tracked.req_id]
            (token,) = output.sampled_token_ids[index]
            if not 0 <= token < self._info.vocab_size:
                # Also what the ranks put where the logits are not finite.
                bad.append(sequence.handle)
                continue
            if tracked.restrictions.any and not tracked.restrictions.permits(sequence, token):
                empty.append(sequence.handle)
                continue
            result.token_ids[sequence.handle] = token
            named = sequence.sampling.logprob_token_ids
            if named or sequence.sampling.logprobs is not None:
                found = _logprobs(output.logprobs, index, sequence.sampling.logprobs or 0)
                if named:
                    values = named_logprobs[tracked.req_id]
                    found = replace(found, top_token_ids=named, top_logprobs=values)
                result.logprobs[sequence.handle] = found
        if empty:
            raise NothingAllowed(tuple(empty))
        if bad:
            raise NotFinite("logits are not finite", tuple(bad))

    @staticmethod
    def _pairs(copies: Seq[BlockCopy]) -> list[tuple[int, int]]:
        from worker_svc.runner.vllm.internals import NULL_BLOCKS  # noqa: PLC0415 - see __init__

        return [(copy.device_block + NULL_BLOCKS, copy.host_block) for copy in copies]


class RankCopies(Protocol):
    """What a ticket asks the ranks."""

    def copy_took_s(self, number: int) -> list[float | None]:
        """Return what each rank has to tell of a copy: how long it took, once, when it is done."""


class Ticket:
    """A copy to the device, which is done when every rank has told how long its part took."""

    def __init__(self, ranks: RankCopies, number: int) -> None:
        self._ranks = ranks
        self._number = number
        self._took_s: list[float | None] = [None]

    def done(self) -> bool:
        """Return whether the data has arrived."""
        if None in self._took_s:
            told = self._ranks.copy_took_s(self._number)
            known = self._took_s if len(self._took_s) == len(told) else [None] * len(told)
            self._took_s = [new if old is None else old for old, new in zip(known, told, strict=True)]
        return None not in self._took_s

    def elapsed_s(self) -> float:
        """Return how long the slowest rank took."""
        return max([took_s for took_s in self._took_s if took_s is not None])


def _chunks(row: Row, limit: int) -> Iterator[Row]:
    end = row.start + row.num_tokens
    for start in range(row.start, end, limit):
        num_tokens = min(limit, end - start)
        yield Row(row.sequence, start, num_tokens, row.sample and start + num_tokens == end)


def _logprobs(lists: Any, index: int, num_top: int) -> TokenLogprobs:
    """Return one row of vLLM's arrays, whose column 0 is the sampled token."""
    token_ids = lists.logprob_token_ids[index].tolist()
    values = lists.logprobs[index].tolist()
    return TokenLogprobs(
        token_id=token_ids[0],
        logprob=values[0],
        rank=int(lists.sampled_token_ranks[index]),
        top_token_ids=tuple(token_ids[1 : num_top + 1]),
        top_logprobs=tuple(values[1 : num_top + 1]),
    )
