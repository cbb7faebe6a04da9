"""Which tokens a sequence may not sample next, for whatever reason; nothing of it is state."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from worker_svc.grammar.backend import is_allowed
from worker_svc.runner.base import SequenceData


class Restrictions:
    """What a request allows and bans, worked out once. Bans are functions of the output so far."""

    def __init__(self, sequence: SequenceData, eos_token_ids: Collection[int], vocab_size: int) -> None:
        sampling = sequence.sampling
        self.allowed = tuple(sorted({one for one in sampling.allowed_token_ids if one < vocab_size}))
        """The only tokens that may be sampled; empty: all."""
        # A guide has seen to it where there is one.
        self._min_tokens = sampling.min_tokens or 0 if sequence.guide is None else 0
        eos = () if sampling.ignore_eos else eos_token_ids
        ends = {*eos, *sampling.stop_token_ids} if self._min_tokens else set()
        self._ends = tuple(sorted(one for one in ends if one < vocab_size))
        known = [ids for ids in sampling.bad_words_token_ids if ids[-1] < vocab_size]
        self._always = tuple([ids[0] for ids in known if len(ids) == 1])
        self._after: dict[int, list[tuple[int, ...]]] = {}
        """Longer sequences by their last token but one."""
        for ids in known:
            if len(ids) > 1:
                self._after.setdefault(ids[-2], []).append(ids)

    @property
    def any(self) -> bool:
        """Whether anything is restricted at all."""
        return bool(self.allowed or self._ends or self._always or self._after)

    def bans(self, sequence: SequenceData) -> Seq[int]:
        """Return the tokens that must not be sampled now, those that are not allowed left out."""
        found: Seq[int] = self._always
        num_output = sequence.num_output_tokens
        if num_output < self._min_tokens:
            found = (*found, *self._ends)
        if self._after and num_output:
            tokens = sequence.token_ids
            ended = [
                ids[-1]
                for ids in self._after.get(tokens[-1], ())
                if len(ids) <= num_output + 1 and tuple(tokens[1 - len(ids) :]) == ids[:-1]
            ]
            found = (*found, *ended)
        return found

    def permits(self, sequence: SequenceData, token_id: int) -> bool:
        """Return whether a token may be sampled now; its grammar, if there is one, has a say too."""
        guide = sequence.guide
        if guide is not None and not sequence.held and not is_allowed(guide.mask, token_id):
            return False
        return (not self.allowed or token_id in self.allowed) and token_id not in self.bans(sequence)
