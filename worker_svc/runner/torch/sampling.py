"""Picks the next token of every row of a step at once, and remembers what that needs of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from octavo.protocol.steps import TokenLogprobs
from torch import Tensor

from worker_svc.errors import NotFinite, NothingAllowed
from worker_svc.grammar.backend import WORD_BITS, Mask
from worker_svc.runner.base import SequenceData
from worker_svc.runner.restrictions import Restrictions
from worker_svc.runner.scoring import report
from worker_svc.runner.torch.noise import gumbel, row_key, stream_key

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_GREEDY_BELOW: Final = 1e-5
"""A temperature below this would overflow the division; it is greedy for all purposes."""
_NO_MASKS: Final[Mapping[int, Mask]] = MappingProxyType({})
_NUCLEUS_GUESS: Final = 256
"""So many best tokens almost always cover top_p; a row that needs more is sorted whole."""
_MOST_EDITED: Final = 1e30
"""A penalty may not take a logit beyond what any temperature leaves finite."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens by handle, and log probabilities of those that asked for them."""

    token_ids: dict[int, int]
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Samples batches of rows; remembers the penalties of the sequences it has been given."""

    def __init__(self, eos_token_ids: Seq[int], vocab_size: int, device: torch.device) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, SamplingState] = {}
        self._never = torch.tensor(-torch.inf, device=device)
        self._bits = torch.arange(WORD_BITS, dtype=torch.int32, device=device)
        self._all_ids = torch.arange(vocab_size, dtype=torch.int32, device=device).unsqueeze(0)

    def forget(self, handles: Iterable[int]) -> None:
        """Drop what is known of these sequences."""
        for handle in handles:
            self._states.pop(handle, None)

    def sample(
        self, logits: Tensor, sequences: Seq[SequenceData], masks: Mapping[int, Mask] = _NO_MASKS
    ) -> Sampled:
        """Sample one token per row of `logits` [R, vocab] (float32, overwritten).

        What `masks` leave out, by handle, has no probability, whatever else is asked for.

        Raises:
            NotFinite: rows hold something that is not a number; their handles are named.
            NothingAllowed: every token of some rows is banned; their handles are named.
        """
        states = [self._state(sequence) for sequence in sequences]
        if masks:
            self._mask(logits, [(row, seq.handle) for row, seq in enumerate(sequences)], masks)
        reporting = [row for row, state in enumerate(states) if state.reports]
        raw = logits[self._index(reporting)] if reporting else None
        self._edit(logits, states)
        best, chosen = logits.max(dim=-1)
        bad = torch.isfinite(best).logical_not_().nonzero().flatten().tolist()
        if empty := [row for row in bad if states[row].restrictions.any and best[row] == -torch.inf]:
            raise NothingAllowed(tuple(sequences[row].handle for row in empty))
        if bad:
            raise NotFinite("logits are not finite", tuple(sequences[row].handle for row in bad))
        drawing = [row for row, state in enumerate(states) if not state.greedy]
        if drawing:
            rows = self._index(drawing)
            chosen[rows] = self._draw(logits[rows], [states[row] for row in drawing])
        handles = [sequence.handle for sequence in sequences]
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            reports = _report(raw, chosen[self._index(reporting)], [states[row] for row in reporting])
            logprobs = {handles[row]: report for row, report in zip(reporting, reports, strict=True)}
        return Sampled(dict(zip(handles, chosen.tolist(), strict=True)), logprobs)

    def _state(self, sequence: SequenceData) -> SamplingState:
        state = self._states.get(sequence.handle)
        if state is None or state.sequence is not sequence:
            state = SamplingState(sequence, self._eos_token_ids, self._vocab_size)
            self._states[sequence.handle] = state
        return state

    def _mask(self, logits: Tensor, rows: Seq[tuple[int, int]], masks: Mapping[int, Mask]) -> None:
        """Take the rest from the rows, given with their handles, that have a mask."""
        masked = [(row, masks[handle]) for row, handle in rows if handle in masks]
        allowed = self._unpacked(np.stack([mask for _, mask in masked]))
        if len(masked) == len(rows):
            torch.where(allowed, logits, self._never, out=logits)
        else:
            index = self._index([row for row, _ in masked])
            logits[index] = torch.where(allowed, logits[index], self._never)

    def _unpacked(self, words: Mask) -> Tensor:
        """Return a flag for each token of masks [G, words]."""
        if self._device.type == "cpu":
            bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
            return torch.from_numpy(bits.view(np.bool_))
        # The way to the device is the longer part.
        packed = torch.from_numpy(words).to(self._device)
        on_device = packed.unsqueeze(-1).bitwise_right_shift(self._bits).bitwise_and_(1)  # [G, words, 32]
        return on_device.flatten(1)[:, : self._vocab_size] != 0

    def _index(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _edit(self, logits: Tensor, states: Seq[SamplingState]) -> None:
        """Apply penalties, biases and bans to the tokens they concern."""
        edits = [(row, *state.current_edits()) for row, state in enumerate(states) if state.edits]
        if edits:
            rows = self._rows_of([(row, ids.size) for row, ids, _, _ in edits])
            ids = self._concatenated([ids for _, ids, _, _ in edits])
            divisors = self._concatenated([divisors for _, _, divisors, _ in edits])
            offsets = self._concatenated([offsets for _, _, _, offsets in edits])
            raw = logits[rows, ids]
            values = torch.where(raw > 0, raw / divisors, raw * divisors) + offsets
            # What the model gave stays no number if it was none, and is told of.
            bounded = values.clamp(-_MOST_EDITED, _MOST_EDITED)
            logits[rows, ids] = torch.where(torch.isfinite(raw), bounded, values)
        for row, state in enumerate(states):
            if state.restrictions.allowed:
                allowed = self._index(state.restrictions.allowed)
                kept = logits[row, allowed]
                logits[row] = -torch.inf
                logits[row, allowed] = kept
        bans = [(row, banned) for row, state in enumerate(states) if (banned := state.bans())]
        if bans:
            rows = self._rows_of([(row, len(banned)) for row, banned in bans])
            logits[rows, self._index([one for _, banned in bans for one in banned])] = -torch.inf

    def _rows_of(self, counts: Seq[tuple[int, int]]) -> Tensor:
        rows, repeats = zip(*counts, strict=True)
        return torch.from_numpy(np.repeat(rows, repeats)).to(self._device)

    def _concatenated(self, parts: Seq[np.ndarray[tuple[int], np.dtype[np.number]]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)

    def _draw(self, logits: Tensor, states: Seq[SamplingState]) -> Tensor:
        """Return a random token per row of `logits` [R, vocab], [R]."""
        scaled = logits.mul_(self._column([state.inverse_temperature for state in states]))
        keys = torch.tensor([state.key() for state in states], dtype=torch.int32, device=self._device)
        chosen = torch.empty(len(states), dtype=torch.long, device=self._device)
        free = [row for row, state in enumerate(states) if not state.filters]
        if free:
            rows = self._index(free)
            chosen[rows] = self._draw_free(scaled[rows], keys[rows], [states[row] for row in free])
        filtered = [row for row, state in enumerate(states) if state.filters]
        if filtered:
            rows = self._index(filtered)
            some = [states[row] for row in filtered]
            chosen[rows] = self._draw_filtered(scaled[rows], keys[rows], some)
        return chosen

    def _draw_free(self, scaled: Tensor, keys: Tensor, states: Seq[SamplingState]) -> Tensor:
        scores = gumbel(keys, self._all_ids).add_(scaled)
        if any(state.log_min_p > -np.inf for state in states):
            floor = scaled.amax(dim=-1, keepdim=True) + self._column([state.log_min_p for state in states])
            scores.masked_fill_(scaled < floor, -torch.inf)
        return scores.argmax(dim=-1)

    def _draw_filtered(self, scaled: Tensor, keys: Tensor, states: Seq[SamplingState]) -> Tensor:
        """Draw among the best tokens only: top_k, then top_p of what is left, then min_p."""
        counts = [state.top_k if state.top_k < self._vocab_size else _NUCLEUS_GUESS for state in states]
        values, token_ids = scaled.topk(min(max(counts), self._vocab_size), dim=-1)  # [R, K], best first
        top_k = self._column([state.top_k for state in states])
        values.masked_fill_(torch.arange(values.shape[1], device=self._device) >= top_k, -torch.inf)
        # Probabilities are relative to what top_k keeps, or to the whole vocabulary.
        of_all = top_k >= self._vocab_size
        total = torch.where(
            of_all, scaled.logsumexp(dim=-1, keepdim=True), values.logsumexp(dim=-1, keepdim=True)
        )
        probabilities = (values - total).exp_()
        before = probabilities.cumsum(dim=-1) - probabilities
        top_p = self._column([state.top_p for state in states])
        floor = values[:, :1] + self._column([state.log_min_p for state in states])
        dropped = (before >= top_p) | (values < floor)
        dropped[:, 0] = False
        scores = gumbel(keys, token_ids.to(torch.int32)).add_(values).masked_fill_(dropped, -torch.inf)
        chosen = token_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).flatten()
        if values.shape[1] < self._vocab_size:
            covered = probabilities.sum(dim=-1, keepdim=True) >= top_p
            short = (of_all & ~covered).flatten().nonzero().flatten().tolist()
            if short:
                rows = self._index(short)
                chosen[rows] = self._draw_sorted(scaled[rows], keys[rows], [states[row] for row in short])
        return chosen

    def _draw_sorted(self, scaled: Tensor, keys: Tensor, states: Seq[SamplingState]) -> Tensor:
        """Draw under a top_p that reaches deep into the vocabulary."""
        values, token_ids = scaled.sort(dim=-1, descending=True)
        probabilities = values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = before >= self._column([state.top_p for state in states])
        dropped |= values < values[:, :1] + self._column([state.log_min_p for state in states])
        dropped[:, 0] = False
        scores = gumbel(keys, token_ids.to(torch.int32)).add_(values).masked_fill_(dropped, -torch.inf)
        return token_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).flatten()

    def _column(self, values: Seq[float]) -> Tensor:
        return torch.tensor(values, device=self._device).unsqueeze(1)


def _report(raw: Tensor, chosen: Tensor, states: Seq[SamplingState]) -> list[TokenLogprobs]:
    """Return log probabilities under the model itself: before penalties, temperature and filters."""
    logprobs = raw.log_softmax(dim=-1)
    reports = report(logprobs, chosen, [state.num_logprobs or 0 for state in states])
    for row, state in enumerate(states):
        if named := state.logprob_token_ids:
            values = tuple(logprobs[row, list(named)].tolist())
            reports[row] = replace(reports[row], top_token_ids=named, top_logprobs=values)
    return reports


class SamplingState:
    """Settings of one sequence, resolved, and its edits of the logits.

    An edit is a token id with a divisor and an offset: penalties and biases touch the tokens that a
    sequence has seen, never the whole vocabulary. They are kept up to date one token at a time.
    """

    def __init__(self, sequence: SequenceData, eos_token_ids: Seq[int], vocab_size: int) -> None:
        params = sequence.sampling
        self.sequence = sequence
        temperature = 1.0 if params.temperature is None else params.temperature
        self.greedy = temperature < _GREEDY_BELOW
        self.inverse_temperature = 1.0 if self.greedy else 1.0 / temperature
        self.top_k = min(params.top_k or vocab_size, vocab_size)
        self.top_p = 1.0 if params.top_p is None else params.top_p
        self.filters = self.top_p < 1.0 or self.top_k < vocab_size
        self.log_min_p = -np.inf if not params.min_p else float(np.log(params.min_p))
        self.num_logprobs = params.logprobs
        self.logprob_token_ids = params.logprob_token_ids
        self.restrictions = Restrictions(sequence, eos_token_ids, vocab_size)
        self._stream = stream_key(params.seed or 0, sequence.choice)
        self._repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._presence = params.presence_penalty or 0.0
        self._frequency = params.frequency_penalty or 0.0
        self._penalizes = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        self._num_seen = 0
        self._entries: dict[int, int] = {}
        self._ids = np.empty(16, dtype=np.int64)
        self._divisors = np.ones(16, dtype=np.float32)
        self._offsets = np.zeros(16, dtype=np.float32)
        self._in_output: set[int] = set()
        for token_id, bias in params.logit_bias.items():
            if token_id < vocab_size:
                # First the entry: making it may replace the arrays.
                entry = self._entry(token_id)
                self._offsets[entry] += bias

    @property
    def reports(self) -> bool:
        """Whether log probabilities are wanted."""
        return self.num_logprobs is not None or bool(self.logprob_token_ids)

    @property
    def edits(self) -> bool:
        """Whether this sequence changes logits at all (bans aside)."""
        return self._penalizes or bool(self._entries)

    def key(self) -> tuple[int, int]:
        """Return the key of the randomness for the token about to be sampled."""
        return row_key(self._stream, len(self.sequence.token_ids))

    def bans(self) -> Seq[int]:
        """Return the token ids that must not be sampled now."""
        return self.restrictions.bans(self.sequence) if self.restrictions.any else ()

    def current_edits(self) -> tuple[Ints, Floats, Floats]:
        """Return token ids, divisors and offsets, brought up to date with the sequence's tokens."""
        if self._penalizes:
            self._catch_up()
        count = len(self._entries)
        return self._ids[:count], self._divisors[:count], self._offsets[:count]

    def _catch_up(self) -> None:
        token_ids = self.sequence.token_ids
        prompt_len = self.sequence.prompt_len
        for position in range(self._num_seen, len(token_ids)):
            token_id = token_ids[position]
            entry = self._entry(token_id)
            self._divisors[entry] = self._repetition
            if position >= prompt_len:
                self._offsets[entry] -= self._frequency
                if token_id not in self._in_output:
                    self._in_output.add(token_id)
                    self._offsets[entry] -= self._presence
        self._num_seen = len(token_ids)

    def _entry(self, token_id: int) -> int:
        entry = self._entries.get(token_id)
        if entry is None:
            entry = self._entries[token_id] = len(self._entries)
            if entry == self._ids.size:
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._divisors = np.concatenate([self._divisors, np.ones_like(self._divisors)])
                self._offsets = np.concatenate([self._offsets, np.zeros_like(self._offsets)])
            self._ids[entry] = token_id
        return entry
