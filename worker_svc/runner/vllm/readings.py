"""What is read off vLLM's step beside the next tokens, in each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from octavo.protocol.steps import Pooling, TokenLogprobs

from worker_svc.grammar.backend import Mask, allowed_ids
from worker_svc.runner.base import Row
from worker_svc.runner.scoring import pool, score


@dataclass(frozen=True, slots=True)
class Reading:
    """What is wanted of a row beside its next token."""

    num_tokens: int
    first_before: int
    """Index in the row of the token before the first that is scored."""
    scored_ids: list[int]
    num_top: int
    named: tuple[int, ...]
    """Tokens whose log probabilities are wanted in the place of the sampled one."""
    pooling: Pooling | None

    @classmethod
    def of(cls, row: Row) -> Reading | None:
        """Return what is wanted of a row, if anything is."""
        sequence, scored = row.sequence, row.scored
        named = sequence.sampling.logprob_token_ids if row.sample else ()
        if not scored and not named and row.pooled is None:
            return None
        return cls(
            num_tokens=row.num_tokens,
            first_before=scored.start - 1 - row.start,
            scored_ids=sequence.token_ids[scored.start : scored.stop],
            num_top=sequence.sampling.prompt_logprobs or 0,
            named=named,
            pooling=row.pooled,
        )


@dataclass(frozen=True, slots=True)
class Readings:
    """What was read, by the name that vLLM has for the sequence."""

    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[str, list[float]] = field(default_factory=dict)
    named: dict[str, tuple[float, ...]] = field(default_factory=dict)


@torch.inference_mode()
def read(runner: Any, wanted: Mapping[str, Reading], vocab_size: int, masks: Mapping[str, Mask]) -> Readings:
    """Return what is wanted of a step that vLLM's model runner has executed and not sampled yet.

    `masks` are what grammars allow: the rest has no probability.
    """
    readings, state, batch = Readings(), runner.execute_model_state, runner.input_batch
    for req_id, reading in wanted.items():
        index = batch.req_id_to_index[req_id]
        first = runner.query_start_loc.np[index].item()
        hidden = state.hidden_states[first : first + reading.num_tokens]
        if reading.scored_ids:
            start = reading.first_before
            readings.prompt_logprobs[req_id] = score(
                hidden[start : start + len(reading.scored_ids)],
                reading.scored_ids,
                reading.num_top,
                runner.model.compute_logits,
                vocab_size,
            )
        if reading.pooling is not None:
            readings.pooled[req_id] = pool(hidden, reading.pooling)
        if reading.named and state.logits is not None:
            logits = state.logits[index]
            if req_id in masks:
                allowed = torch.full_like(logits, -torch.inf)
                ids = torch.from_numpy(allowed_ids(masks[req_id])).to(logits.device)
                allowed[ids] = logits[ids]
                logits = allowed
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
            readings.named[req_id] = tuple(logprobs[list(reading.named)].tolist())
    return readings
