"""Whether a block is cheaper to copy between the tiers or to compute again."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.protocol.steps import TierCopies

_WEIGHT = 0.1
"""Of a new measurement in the running average."""
_PROBE_EVERY = 64
"""Of so many blocks that would be computed again one is copied, lest an old measurement rule for ever."""


@dataclass(slots=True)
class CopyCost:
    """Running averages of what copying and computing cost, and the decision between them."""

    block_size: int
    out_us_per_block: float | None = None
    """Device to host."""
    in_us_per_block: float | None = None
    """Host to device."""
    prefill_us_per_token: float | None = None
    decode_us_per_step: float | None = None
    copied_out_blocks: int = 0
    copied_in_blocks: int = 0
    skipped_blocks: int = 0
    """Blocks that were not copied because computing them again was cheaper."""

    def worth_copying(self, num_blocks: int) -> bool:
        """Decide about a group of blocks. Without measurements copying is worth a try."""
        if self.prefill_us_per_token is None or self.in_us_per_block is None:
            return True
        copy_us = self.in_us_per_block + (self.out_us_per_block or 0.0)
        if copy_us <= self.block_size * self.prefill_us_per_token:
            return True
        probes_before = self.skipped_blocks // _PROBE_EVERY
        self.skipped_blocks += num_blocks
        return self.skipped_blocks // _PROBE_EVERY > probes_before

    def copied_out(self, num_blocks: int, elapsed_us: float) -> None:
        """Note a copy from device to host."""
        self.copied_out_blocks += num_blocks
        self.out_us_per_block = _averaged(self.out_us_per_block, elapsed_us / num_blocks)

    def copied_in(self, num_blocks: int, elapsed_us: float) -> None:
        """Note a copy from host to device."""
        self.copied_in_blocks += num_blocks
        self.in_us_per_block = _averaged(self.in_us_per_block, elapsed_us / num_blocks)

    def executed(self, num_decodes: int, num_prefill_tokens: int, elapsed_us: float) -> None:
        """Note a step. What a step costs beyond an average decode step is what its prefill costs."""
        if not num_prefill_tokens:
            if num_decodes:
                self.decode_us_per_step = _averaged(self.decode_us_per_step, elapsed_us)
            return
        decode_us = (self.decode_us_per_step or 0.0) if num_decodes else 0.0
        prefill_us = max(elapsed_us - decode_us, 0.0)
        self.prefill_us_per_token = _averaged(self.prefill_us_per_token, prefill_us / num_prefill_tokens)

    def report(self) -> TierCopies:
        """Return the figures of now."""
        return TierCopies(
            out_blocks=self.copied_out_blocks,
            in_blocks=self.copied_in_blocks,
            skipped_blocks=self.skipped_blocks,
            out_us_per_block=self.out_us_per_block or 0.0,
            in_us_per_block=self.in_us_per_block or 0.0,
        )


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
