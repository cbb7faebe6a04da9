"""The embedded model runner: a Llama-family model on the CPU or a CUDA device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from octavo.sampling import SamplingParams
from torch import Tensor

from worker_svc.errors import (
    DeviceLost,
    InvalidSettings,
    ModelLoadError,
    NotFinite,
    StepFailed,
    StepOutOfMemory,
)
from worker_svc.models.files import ModelFormat, ResolvedModel
from worker_svc.models.progress import Progress
from worker_svc.runner import host_memory
from worker_svc.runner.base import BlockCopy, CopyTicket, LoadedModel, StepBatch, StepResult, guided_rows
from worker_svc.runner.scoring import pool, score
from worker_svc.runner.torch.attention import CPU_PIECES, CUDA_PIECES, PagedAttention
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.compute import Compute, choose_compute
from worker_svc.runner.torch.gguf_file import open_gguf
from worker_svc.runner.torch.hf_folder import open_hf_folder
from worker_svc.runner.torch.kv_pool import KvPool, kv_bytes_per_token
from worker_svc.runner.torch.model import DecoderModel
from worker_svc.runner.torch.packing import BlockTables, Packed, pack, pack_padded
from worker_svc.runner.torch.profile import gpu_bytes_beside_kv
from worker_svc.runner.torch.sampling import Sampler


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Settings of the torch runner."""

    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    padded: bool = False
    """Compute as static batching does: the control arm of experiments."""


def load(model: ResolvedModel, options: TorchOptions, progress: Progress) -> TorchRunner:
    """Load a model.

    Raises:
        ModelLoadError: a file is missing, damaged or not supported; it is named.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    checkpoint = open_gguf(model.path) if model.format is ModelFormat.GGUF else open_hf_folder(model.path)
    return TorchRunner(model, checkpoint, options, progress)


class TorchRunner:
    """A `ModelRunner`. KV lives in the pool's tensors only; a step is one packed batch."""

    def __init__(
        self, model: ResolvedModel, checkpoint: Checkpoint, options: TorchOptions, progress: Progress
    ) -> None:
        self._options = options
        self._config = checkpoint.config
        self._compute = choose_compute(options.device, options.dtype)
        self._pieces = CUDA_PIECES if self._compute.device.type == "cuda" else CPU_PIECES
        longest = self._config.max_position_embeddings
        max_model_len = min(options.max_model_len or longest, longest)
        with torch.inference_mode(), _out_of_memory_as(ModelLoadError, f"{model.path}: loading it"):
            self._model = DecoderModel(checkpoint, self._compute, max_model_len, progress)
        self._info = describe(model, checkpoint, self._compute, max_model_len)
        self._sampler = Sampler(self._info.text.eos_token_ids, self._config.vocab_size, self._compute.device)
        self._tables = BlockTables()
        self._pool: KvPool | None = None

    @property
    def info(self) -> LoadedModel:
        """The model's description."""
        return self._info

    def available_kv_bytes(self, utilization: float) -> int:
        """Return the bytes that KV blocks may take: a share of what is free, or of a GPU's memory.

        Raises:
            InvalidSettings: there is not even memory for the largest step.
        """
        if self._compute.device.type == "cpu":
            return int(host_memory.available_bytes() * utilization)
        total = torch.cuda.mem_get_info(self._compute.device)[1]
        tokens = self._options.max_num_batched_tokens
        with _out_of_memory_as(InvalidSettings, f"a step of {tokens} tokens beside the weights"):
            beside = gpu_bytes_beside_kv(self._model, tokens, self._options.max_num_seqs, self._pieces)
        return max(0, int(total * utilization) - beside)

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """Make the KV memory. Raises MemoryError when it does not fit."""
        self._pool = None  # what was there must not count against what comes
        self._pool = KvPool(self._config, self._compute, num_blocks, block_size, num_host_blocks)

    def supports(self, sampling: SamplingParams) -> str | None:
        """Return what of `sampling` this runner cannot do, or None."""
        del sampling
        return None

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute one step; see `ModelRunner.execute`."""
        self._forget(batch.removed)
        self._forget(sequence.handle for sequence in batch.added)
        if not batch.rows:
            return StepResult({}, {})
        with _device_errors(), torch.inference_mode():
            return self._step(batch, self._allocated)

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Copy blocks out; on return the device blocks may be overwritten."""
        with _device_errors(), torch.inference_mode():
            self._allocated.copy_to_host(copies)

    def copy_to_device(self, copies: Seq[BlockCopy]) -> CopyTicket:
        """Start to copy blocks in; steps may run meanwhile, but not on these blocks."""
        with _device_errors(), torch.inference_mode():
            return self._allocated.copy_to_device(copies)

    def close(self) -> None:
        """Give everything back."""
        self._pool = None

    @property
    def _allocated(self) -> KvPool:
        if self._pool is None:
            raise RuntimeError("the runner has no KV memory: allocate() comes first")
        return self._pool

    def _forget(self, handles: Iterable[int]) -> None:
        gone = tuple(handles)
        self._tables.forget(gone)
        self._sampler.forget(gone)

    def _step(self, batch: StepBatch, pool: KvPool) -> StepResult:
        arrange = pack_padded if self._options.padded else pack
        packed = arrange(batch, self._tables, pool.block_size)
        attention = PagedAttention(packed, pool, self._config, self._pieces)
        device = self._compute.device
        hidden = self._model.hidden(
            torch.from_numpy(packed.token_ids).to(device),
            torch.from_numpy(packed.positions).to(device),
            attention,
        )
        _refuse_non_finite(hidden, packed, pool)
        result = StepResult({}, {})
        self._read(hidden, packed, result)
        sampling = [placed for placed in packed.rows if placed.row.sample]
        if not sampling:
            return result
        last = [placed.first + placed.row.num_tokens - 1 for placed in sampling]
        logits = self._model.logits(hidden[torch.tensor(last, device=device)])
        guides, unguided = guided_rows(batch.rows)
        sequences = [placed.row.sequence for placed in sampling]
        sampled = self._sampler.sample(
            logits, sequences, {handle: guide.mask for handle, guide in guides.items()}
        )
        for handle in unguided:
            del sampled.token_ids[handle]
        return replace(result, token_ids=sampled.token_ids, logprobs=sampled.logprobs, unguided=unguided)

    def _read(self, hidden: Tensor, packed: Packed, result: StepResult) -> None:
        """Take from the hidden states what is wanted beside the next tokens."""
        for placed in packed.rows:
            row, sequence = placed.row, placed.row.sequence
            own = hidden[placed.first : placed.first + row.num_tokens]
            if scored := row.scored:
                before = own[scored.start - 1 - row.start : scored.stop - 1 - row.start]
                token_ids = sequence.token_ids[scored.start : scored.stop]
                num_top = sequence.sampling.prompt_logprobs or 0
                result.prompt_logprobs[sequence.handle] = score(
                    before, token_ids, num_top, self._model.logits, self._config.vocab_size
                )
            if row.pooled is not None:
                result.pooled[sequence.handle] = pool(self._model.normed(own), row.pooled)


def describe(
    model: ResolvedModel, checkpoint: Checkpoint, compute: Compute, max_model_len: int
) -> LoadedModel:
    """Return the description of `model`, loaded from `checkpoint` for `compute`."""
    return LoadedModel(
        model_id=model.model_id,
        revision=model.revision,
        text=checkpoint.text,
        runner="torch",
        dtype=_dtype_name(compute.weights),
        kv_dtype=_dtype_name(compute.activations),
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=max_model_len,
        kv_bytes_per_token=kv_bytes_per_token(checkpoint.config, compute),
        device=str(compute.device),
    )


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_non_finite(hidden: Tensor, packed: Packed, pool: KvPool) -> None:
    """Fail the rows that computed something else than numbers, and leave no trace of it in the pool.

    A key or value that is not finite makes the output of its own token so, too: checking the last
    layer covers the pool.
    """
    if torch.isfinite(hidden.sum(dtype=torch.float32)):
        return
    finite = torch.isfinite(hidden).all(dim=-1).tolist()
    bad = [
        placed
        for placed in packed.rows
        if not all(finite[placed.first : placed.first + placed.row.num_tokens])
    ]
    for placed in bad:
        pool.clear(packed.slots[placed.first : placed.first + placed.row.num_tokens])
    if bad:
        raise NotFinite("activations are not finite", tuple(placed.row.sequence.handle for placed in bad))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def _out_of_memory_as(kind: type[ModelLoadError | InvalidSettings], what: str) -> Iterator[None]:
    """Raise `kind` when there is not enough memory for `what`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise kind(f"{what} takes more memory than there is: {error}") from error


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Translate what torch raises into the worker's errors."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error)) from error
    except (RuntimeError, IndexError, MemoryError) as error:
        if _is_out_of_memory(error):
            raise StepOutOfMemory(str(error)) from error
        raise StepFailed(str(error)) from error
