"""A runner without a model: steps take the time that a profile says, tokens are made up.

For capacity planning and tests of whole fleets. Scheduling, blocks, protocol and accounting are the
real ones; nothing that it generates means anything, and everything it reports says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Final, NamedTuple

from octavo.protocol.steps import Pooling
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker_svc.errors import NothingAllowed
from worker_svc.grammar.backend import allowed_ids
from worker_svc.grammar.guide import Guide
from worker_svc.models.text import ModelText
from worker_svc.runner.base import (
    BlockCopy,
    LoadedModel,
    Row,
    SequenceData,
    StepBatch,
    StepResult,
    guided_rows,
)
from worker_svc.runner.restrictions import Restrictions

BUILT_IN: Final = "sim"
KV_BYTES_PER_TOKEN: Final = 23_040
"""As SmolLM2-135M in bfloat16: 30 layers x 3 heads x 64 values x 2 (key, value) x 2 bytes."""
DEVICE_BYTES: Final = 8 * 2**30
COPY_BYTES_PER_S: Final = 10e9
CONTEXT: Final = 8192
VECTOR_SIZE: Final = 16

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS: Final = 2
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MASK: Final = 2**64 - 1


class SimRunner:
    """Sleeps for as long as a step would take.

    A token is a pure function of (seed, choice, position, previous token) and of what a grammar allows:
    batches, chunks, restarts and moves change nothing. End-of-sequence tokens come up only where a grammar
    may end; other requests end by max_tokens.
    """

    def __init__(
        self,
        info: LoadedModel,
        times: StepTimes,
        speed: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
        *,
        padded: bool = False,
    ) -> None:
        self._info = info
        self._times = times
        self._speed = speed
        self._sleep = sleep
        self._load_of = padded_load_of if padded else load_of
        self._block_bytes = 0
        ends = set(info.text.eos_token_ids)
        self._vocabulary = [token_id for token_id in range(info.vocab_size) if token_id not in ends]

    @property
    def info(self) -> LoadedModel:
        """The model that is simulated."""
        return self._info

    def available_kv_bytes(self, utilization: float) -> int:
        """Return a share of an imaginary device."""
        return int(DEVICE_BYTES * utilization)

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """Take nothing: blocks have no contents here."""
        del num_blocks, num_host_blocks
        self._block_bytes = block_size * self._info.kv_bytes_per_token

    def supports(self, sampling: SamplingParams) -> str | None:
        """Refuse what would need a model."""
        if sampling.logprobs is not None or sampling.logprob_token_ids:
            return "logprobs: simulated tokens have no probabilities"
        if sampling.prompt_logprobs is not None:
            return "prompt_logprobs: simulated tokens have no probabilities"
        return None

    def execute(self, batch: StepBatch) -> StepResult:
        """Sleep, then make up the tokens."""
        self._sleep(self._times.seconds(*self._load_of(batch)) / self._speed)
        guides, unguided = guided_rows(batch.rows)
        result = StepResult({}, {}, unguided)
        for row in batch.rows:
            sequence = row.sequence
            if row.sample and sequence.handle not in unguided:
                position = row.start + row.num_tokens
                noise = _noise(
                    sequence.sampling.seed or 0, sequence.choice, position, sequence.token_ids[position - 1]
                )
                token_id = self._token(sequence, guides.get(sequence.handle), noise)
                result.token_ids[sequence.handle] = token_id
            if row.pooled is not None:
                result.pooled[sequence.handle] = _vector(row, row.pooled)
        return result

    def _token(self, sequence: SequenceData, guide: Guide | None, noise: int) -> int:
        tokens: Seq[int] = self._vocabulary if guide is None else allowed_ids(guide.mask).tolist()
        sampling = sequence.sampling
        if sampling.allowed_token_ids or sampling.bad_words_token_ids:
            restrictions = Restrictions(sequence, (), self._info.vocab_size)
            if restrictions.allowed:
                # Without a grammar also those that end.
                permitted = set(restrictions.allowed if guide is None else tokens)
                tokens = [token_id for token_id in restrictions.allowed if token_id in permitted]
            banned = restrictions.bans(sequence)
            tokens = [token_id for token_id in tokens if token_id not in banned]
        if not tokens:
            raise NothingAllowed((sequence.handle,))
        return tokens[noise % len(tokens)]

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Sleep for as long as the copies would take."""
        self._sleep(len(copies) * self._block_bytes / COPY_BYTES_PER_S / self._speed)

    def copy_to_device(self, copies: Seq[BlockCopy]) -> SimCopy:
        """Return a ticket that is due when the copies would be done."""
        return SimCopy(len(copies) * self._block_bytes / COPY_BYTES_PER_S / self._speed)

    def close(self) -> None:
        """Nothing to give back."""


class SimCopy:
    """A copy that takes its time."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._due = time.monotonic() + duration_s

    def done(self) -> bool:
        """Return whether the time has passed."""
        return time.monotonic() >= self._due

    def elapsed_s(self) -> float:
        """Return how long it takes."""
        return self._duration_s


class StepLoad(NamedTuple):
    """What a step computes, as `StepTimes.seconds` takes it."""

    num_decodes: int
    context_tokens: int
    prefill_tokens: int
    prefill_squares: int


def load_of(batch: StepBatch) -> StepLoad:
    """Return what a batch computes."""
    decodes = context = prefill = squares = 0
    for row in batch.rows:
        if row.num_tokens == 1 and row.sequence.prefill_done:
            decodes += 1
            context += row.start + 1
        else:
            prefill += row.num_tokens
            squares += row.num_tokens * (row.num_tokens + 2 * row.start)
    return StepLoad(decodes, context, prefill, squares)


def padded_load_of(batch: StepBatch) -> StepLoad:
    """Return what a batch computes when prompts take as much room as the longest, as on the torch runner."""
    load = load_of(batch)
    longer = [row for row in batch.rows if row.num_tokens > 1]
    if not longer or any(row.start > 0 for row in longer):
        return load
    widest = max(row.num_tokens for row in longer)
    return load._replace(
        prefill_tokens=load.prefill_tokens + sum(widest - row.num_tokens for row in longer),
        prefill_squares=load.prefill_squares + sum(widest**2 - row.num_tokens**2 for row in longer),
    )


def _noise(seed: int, choice: int, position: int, previous: int) -> int:
    """Mix four numbers into 64 bits (the finalizer of splitmix64, Steele et al. 2014, per number)."""
    state = 0
    for value in (seed, choice, position, previous):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _vector(row: Row, pooling: Pooling) -> list[float]:
    """Return what a row adds to the vector of its sequence: numbers that follow from its tokens."""
    token_ids = row.sequence.token_ids[row.start : row.start + row.num_tokens]
    if pooling is Pooling.LAST:
        return _made_up(token_ids[-1])
    return [sum(column) for column in zip(*map(_made_up, token_ids), strict=True)]


def _made_up(token_id: int) -> list[float]:
    return [_noise(token_id, 0, place, 0) / 2**63 - 1.0 for place in range(VECTOR_SIZE)]


def byte_level_tokenizer() -> str:
    """Return a tokenizer.json of one token per byte, after the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    text: str = tokenizer.to_str()
    return text


def simulated(info: LoadedModel) -> LoadedModel:
    """Return a model's description with all that concerns weights made up."""
    tokenizer = Tokenizer.from_str(info.text.tokenizer_files["tokenizer.json"].decode())
    return replace(
        info,
        revision=f"sim-{info.revision}",
        dtype="simulated",
        kv_dtype="simulated",
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=CONTEXT,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        device="sim",
    )


def built_in_model() -> LoadedModel:
    """Return the description of `--model sim`, which needs no download."""
    text = ModelText(
        tokenizer_files={"tokenizer.json": byte_level_tokenizer().encode()},
        eos_token_ids=(_EOS,),
        bos_token_id=None,
        add_bos_token=False,
        chat_template=_TEMPLATE,
        special_tokens={"eos_token": _SPECIAL[_EOS]},
    )
    return simulated(LoadedModel(BUILT_IN, "1", text, "sim"))
