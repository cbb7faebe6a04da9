"""What sampling remembers of a sequence from step to step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import numpy.typing as npt
from octavo.sampling import SamplingParams

from worker_svc.engine.sequence import Sequence
from worker_svc.runner.torch.noise import row_key, stream_key

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_GREEDY_BELOW: Final = 1e-5
"""A temperature below this would overflow the division; it is greedy for all purposes."""


class SamplingState:
    """Settings of one sequence, resolved, and its edits of the logits.

    An edit is a token id with a divisor and an offset: penalties and biases touch the tokens that a
    sequence has seen, never the whole vocabulary. They are kept up to date one token at a time.
    """

    def __init__(self, sequence: Sequence, eos_token_ids: Seq[int], vocab_size: int) -> None:
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
        self.min_tokens = params.min_tokens or 0
        self._banned_at_first = _ends(params, eos_token_ids, vocab_size)
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
                self._offsets[self._entry(token_id)] += bias

    @property
    def edits(self) -> bool:
        """Whether this sequence changes logits at all (bans aside)."""
        return self._penalizes or bool(self._entries)

    def key(self) -> tuple[int, int]:
        """Return the key of the randomness for the token about to be sampled."""
        return row_key(self._stream, len(self.sequence.token_ids))

    def bans(self) -> Ints:
        """Return the token ids that must not be sampled now."""
        return self._banned_at_first if self.sequence.num_output_tokens < self.min_tokens else _NONE

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


_NONE: Final = np.empty(0, dtype=np.int64)


def _ends(params: SamplingParams, eos_token_ids: Seq[int], vocab_size: int) -> Ints:
    eos = () if params.ignore_eos else eos_token_ids
    ends = {*eos, *params.stop_token_ids}
    return np.array(sorted(token_id for token_id in ends if token_id < vocab_size), dtype=np.int64)
