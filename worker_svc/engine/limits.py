"""What a step may hold, and how that came about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """A number, and how it came about."""

    value: int
    reason: str = "set"
    chosen: bool = False
    """Nobody has set it."""

    def at_most(self, value: int, reason: str) -> Limit:
        """Return what is left of a chosen limit; one that was set stays."""
        return Limit(value, reason, chosen=True) if self.chosen and value < self.value else self


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    seqs: Limit
    tokens: Limit

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at the same time, at most."""
        return self.seqs.value

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens computed in one step, at most; not less than the sequences."""
        return self.tokens.value

    @property
    def reason(self) -> str:
        """How both came about."""
        seqs, tokens = self.seqs, self.tokens
        if seqs.reason == tokens.reason:
            return f"{seqs.value} sequences and {tokens.value} tokens a step ({seqs.reason})"
        return f"{seqs.value} sequences ({seqs.reason}), {tokens.value} tokens a step ({tokens.reason})"

    def within(self, num_blocks: int, block_size: int) -> Limits:
        """Return what of them a pool can hold: a sequence takes a block, a token a slot."""
        room = f"all that {num_blocks} KV blocks hold"
        seqs = self.seqs.at_most(num_blocks, room)
        return Limits(seqs, self.tokens.at_most(max(num_blocks * block_size, seqs.value), room))
