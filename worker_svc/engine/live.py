"""What the engine keeps of a sequence beside the record that it shares with the runner."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.protocol.steps import Admit

from worker_svc.kv.memory import Arrival
from worker_svc.runner.base import Row, Sequence


@dataclass(slots=True)
class Live:
    """One live sequence. Derived limits are worked out once, not per token."""

    sequence: Sequence
    keys: dict[int, bytes]
    """Keys of blocks that are not published yet, by index in the block table."""
    stop_ids: frozenset[int]
    """Tokens that end it."""
    stops_from: int
    """Position of the first token that may end it."""
    max_len: int
    """Tokens at most, prompt included."""
    capacity: int
    """Tokens that its blocks hold."""
    row: Row
    """Its share of a decode step."""
    introduced: bool = False
    """The runner knows it."""
    arrival: Arrival | None = None
    """Cached blocks that are still on their way."""
    lost_tokens: int = 0
    """Reported as cached, but their copy failed: they are computed beyond what plans ask for."""


def live_from(admit: Admit, eos_token_ids: frozenset[int], max_model_len: int) -> Live:
    """Return a sequence as it was admitted, without blocks."""
    sampling = admit.sampling
    sequence = Sequence(
        handle=admit.handle,
        token_ids=list(admit.token_ids),
        prompt_len=admit.prompt_len,
        sampling=sampling,
        choice=admit.choice,
        priority=admit.priority,
        adapter=admit.adapter,
        hold_after_finish=admit.hold_after_finish,
    )
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= eos_token_ids
    max_len = max_model_len
    if sampling.max_tokens is not None:
        max_len = min(max_len, admit.prompt_len + sampling.max_tokens)
    return Live(
        sequence=sequence,
        keys=dict(enumerate(admit.keys)),
        stop_ids=stop_ids,
        stops_from=admit.prompt_len + (sampling.min_tokens or 0),
        max_len=max_len,
        capacity=0,
        row=Row(sequence, 0, 1, sample=True),
    )
