"""How much of everything a message to the scheduler may hold: the one table, for both doors.

No user should meet these; they keep one message from costing more than it can be worth. docs/limits.md has
them for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from octavo.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Of a message of the scheduler's port, and of a body of the gateway."""
MAX_FIELDS: Final = 1 << 17
"""Fields of one message, with those of the messages inside it; a packed list is one."""
MAX_REQUEST_ID: Final = 128
"""Characters."""
MAX_CACHE_SALT: Final = 1024
"""Characters."""
MAX_PROMPT_TOKENS: Final = 1 << 21
MAX_RESUMED_TOKENS: Final = 1 << 20
"""Of all choices of a request."""
MAX_ORDER: Final = 1000
"""Of a request in its class, in either direction."""
MAX_SHOWN: Final = 100
_NAME_BYTES: Final = 1024
_CHARACTER_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class FieldBound:
    """What one field may hold at most."""

    bytes: int | None = None
    """Of a text or a message; in a list, of each. None where elements are numbers."""
    count: int | None = None
    """Elements of a list or a map; None where there is one value."""
    together: bool = False
    """The count is for all messages of the list that this list is in."""


_NAME: Final = FieldBound(_NAME_BYTES)
_WHOLE: Final = FieldBound(MAX_MESSAGE_BYTES)
_LONG: Final = FieldBound(1 << 20)
_GRAMMAR: Final = FieldBound(1 << 18)

BOUNDS: Final[Mapping[str, FieldBound]] = MappingProxyType(
    {
        "GenerateRequest.request_id": FieldBound(_CHARACTER_BYTES * MAX_REQUEST_ID),
        "GenerateRequest.model": _NAME,
        "GenerateRequest.text": _WHOLE,
        "GenerateRequest.resume": FieldBound(count=MAX_N),
        "GenerateRequest.api_key": _LONG,
        "GenerateRequests.requests": FieldBound(count=1 << 14),
        "CancelRequest.request_id": FieldBound(_CHARACTER_BYTES * MAX_REQUEST_ID),
        "TokenIds.ids": FieldBound(count=MAX_PROMPT_TOKENS),
        "ResumedChoice.token_ids": FieldBound(count=MAX_RESUMED_TOKENS, together=True),
        "ServiceTerms.cache_salt": FieldBound(_CHARACTER_BYTES * MAX_CACHE_SALT),
        "Chat.messages": FieldBound(count=1 << 13),
        "Chat.tools_json": _LONG,
        "Chat.template_vars_json": _LONG,
        "Chat.documents_json": _LONG,
        "ChatMessage.role": _NAME,
        "ChatMessage.content": _WHOLE,
        "ChatMessage.name": _NAME,
        "ChatMessage.tool_calls_json": _LONG,
        "ChatMessage.tool_call_id": _NAME,
        "ChatMessage.reasoning": _WHOLE,
        "SamplingParams.logit_bias": FieldBound(count=MAX_LOGIT_BIASES),
        "SamplingParams.stop": FieldBound(MAX_STOP_BYTES, MAX_STOP_STRINGS),
        "SamplingParams.stop_token_ids": FieldBound(count=MAX_STOP_TOKEN_IDS),
        "SamplingParams.allowed_token_ids": FieldBound(count=MAX_ALLOWED_TOKEN_IDS),
        "SamplingParams.bad_words": FieldBound(MAX_BAD_WORD_BYTES, MAX_BAD_WORDS),
        "SamplingParams.bad_words_token_ids": FieldBound(count=MAX_BAD_SEQUENCES),
        "SamplingParams.logprob_token_ids": FieldBound(count=MAX_LOGPROB_TOKEN_IDS),
        "TokenSequence.ids": FieldBound(count=MAX_BAD_SEQUENCE_TOKENS),
        "StructuredOutput.json_schema": _GRAMMAR,
        "StructuredOutput.regex": _GRAMMAR,
        "StructuredOutput.grammar": _GRAMMAR,
        "StructuredOutput.choice": _GRAMMAR,
        "StructuredOutput.structural_tag": _GRAMMAR,
        "ChoiceList.values": FieldBound(1 << 14, 1 << 12),
        "TokenizeRequest.model": _NAME,
        "TokenizeRequest.text": _WHOLE,
        "DetokenizeRequest.model": _NAME,
        "DetokenizeRequest.token_ids": FieldBound(count=MAX_PROMPT_TOKENS),
        "PinPrefixRequest.model": _NAME,
        "PinPrefixRequest.name": _NAME,
        "PinPrefixRequest.text": _WHOLE,
        "PinPrefixRequest.system_prompt": _WHOLE,
        "PinPrefixRequest.cache_salt": FieldBound(_CHARACTER_BYTES * MAX_CACHE_SALT),
        "PinPrefixRequest.tenant": _NAME,
        "UnpinPrefixRequest.model": _NAME,
        "UnpinPrefixRequest.name": _NAME,
        "DrainRequest.worker_id": _NAME,
        "SetFaultsRequest.worker_id": _NAME,
        "SetFaultsRequest.faults": FieldBound(count=64),
        "AuditWorkersRequest.worker_id": _NAME,
    }
)
"""By the field's name in octavo.v1. What is not here is one number, one flag or one message."""


def short(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the beginning of what a client wrote, as an error repeats it: who wrote more knows the rest."""
    return text if len(text) <= limit else f"{text[:limit]}…"
