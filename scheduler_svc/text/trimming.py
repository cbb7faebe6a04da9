"""Shortening of prompts whose client allows it, under load. Runs where prompts are tokenized.

Plain prompts lose the part between the head and the tail that the request keeps; without a tail to
keep that is their end. Chats lose their oldest whole turns, never what comes before the first turn
(system messages), the last turn, or the header that the reply follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from octavo.v1 import generation_pb2 as pb

from scheduler_svc.text.chat import InputError


@dataclass(frozen=True, slots=True)
class TrimSpec:
    """How long a prompt may stay, and what is kept of it even if that is longer. In tokens."""

    max_tokens: int
    keep_head: int = 0
    keep_tail: int = 0

    @property
    def limit(self) -> int:
        """Tokens down to which a prompt is cut."""
        return max(1, self.max_tokens, self.keep_head + self.keep_tail)


def cut(ids: array[int], spec: TrimSpec | None) -> tuple[array[int], int]:
    """Return what is left of a prompt's tokens, and how many went."""
    if spec is None or len(ids) <= spec.limit:
        return ids, 0
    # The first token stays whatever the tail: it may be the one that begins every sequence.
    tail = min(spec.keep_tail, spec.limit - 1)
    head = spec.limit - tail
    kept = ids[:head] + ids[len(ids) - tail :] if tail else ids[:head]
    return kept, len(ids) - len(kept)


def trim_chat(
    chat: pb.Chat, encode: Callable[[pb.Chat], array[int]], spec: TrimSpec | None
) -> tuple[array[int], int]:
    """Return the tokens of a conversation without as many of its oldest turns as it takes to fit.

    Of those turns, none that reaches into the head or the tail that is kept. What a template does not
    render without some turn is not trimmed any further.

    Raises:
        InputError: the template does not take the whole conversation.
    """
    try:
        whole = encode(chat)
    except InputError as error:
        # Too long to be rendered as a whole; it may fit when it is trimmed.
        if spec is None or error.reason != "PROMPT_TOO_LONG":
            raise
        whole = None
    if spec is None or (whole is not None and len(whole) <= spec.limit):
        assert whole is not None
        return whole, 0
    starts = _turns(chat)
    first = _first_to_drop(chat, starts, encode, spec)
    best, size = whole, None
    # Each turn that is dropped makes it shorter: find the fewest to drop by bisection.
    low, high = 1, len(starts) - 1 - first
    while low <= high:
        middle = (low + high) // 2
        try:
            rest = encode(_without(chat, starts, first, middle))
        except InputError as error:
            low, high = (middle + 1, high) if error.reason == "PROMPT_TOO_LONG" else (low, middle - 1)
            continue
        if len(rest) < spec.keep_tail:
            high = middle - 1
            continue
        if size is None or len(rest) < size or len(rest) <= spec.limit:
            best, size = rest, len(rest)
        low, high = (low, middle - 1) if len(rest) <= spec.limit else (middle + 1, high)
    if best is None:
        raise InputError(
            "chat", "the conversation is too long, also without its oldest turns", "PROMPT_TOO_LONG"
        )
    return best, max(0, len(whole) - len(best)) if whole is not None else 0


def _turns(chat: pb.Chat) -> list[int]:
    """Return where each turn begins: at each message of the user, and the first that is no system message."""
    starts: list[int] = []
    for index, message in enumerate(chat.messages):
        opens = not starts and message.role not in {"system", "developer"}
        if opens or (starts and message.role == "user"):
            starts.append(index)
    return starts


def _without(chat: pb.Chat, starts: list[int], first: int, count: int) -> pb.Chat:
    """Return a conversation without `count` turns from the turn `first` on."""
    rest = pb.Chat()
    rest.CopyFrom(chat)
    del rest.messages[starts[first] : starts[first + count]]
    return rest


def _first_to_drop(
    chat: pb.Chat, starts: list[int], encode: Callable[[pb.Chat], array[int]], spec: TrimSpec
) -> int:
    """Return the first turn that begins behind the head that is kept."""
    if not spec.keep_head:
        return 0
    for turn in range(len(starts)):
        opening = pb.Chat()
        opening.CopyFrom(chat)
        opening.add_generation_prompt = False
        del opening.messages[starts[turn] :]
        try:
            if opening.messages and len(encode(opening)) >= spec.keep_head:
                return turn
        except InputError:
            # The template does not take this part alone; it takes a longer one, or nothing is trimmed.
            continue
    return len(starts)
