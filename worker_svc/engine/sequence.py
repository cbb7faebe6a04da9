"""A sequence as the worker runs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.protocol.steps import Priority
from octavo.sampling import SamplingParams


@dataclass(slots=True)
class Sequence:
    """Tokens, progress and blocks of one sequence.

    One invariant drives everything: `num_computed_tokens` catches up with `len(token_ids)`. A
    sequence whose lag is one token and whose prefill is done decodes; KV of token i lives in slot
    i % block_size of block `block_table[i // block_size]`.
    """

    handle: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    choice: int = 0
    priority: Priority = Priority.STANDARD
    adapter: str | None = None
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    prefill_done: bool = False
    hold_after_finish: bool = False
    held: bool = False
    """Finished but kept: its row is still computed and its output thrown away."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, those it was resumed with included."""
        return len(self.token_ids) - self.prompt_len
