"""Stop strings in a stream of text: found across deltas, never shown, nor any part of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, prepared once and shared by its choices."""

    __slots__ = ("_fallbacks", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.first_characters = frozenset(string[0] for string in self.strings)
        self._fallbacks = tuple(_fallbacks(string) for string in self.strings)

    def advance(self, index: int, matched: int, character: str) -> int:
        """Return how much of string `index` the text ends with, after `character` (Knuth-Morris-Pratt)."""
        string, fallbacks = self.strings[index], self._fallbacks[index]
        while matched and string[matched] != character:
            matched = fallbacks[matched - 1]
        return matched + 1 if string[matched] == character else 0


def _fallbacks(string: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0]
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = table[length - 1]
        if string[length] == character:
            length += 1
        table.append(length)
    return table


class StopMatcher:
    """Where one choice's text stands between the stop strings."""

    __slots__ = ("_held", "_matched", "_stops", "stopped_by")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.strings)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text. Of several that end together, the longest."""

    def feed(self, text: str) -> str:
        """Return what may be shown now; the rest is held back while it may belong to a stop string.

        Once `stopped_by` is set, what was returned is all that is ever shown.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text
        stops, matched = self._stops, self._matched
        for position, character in enumerate(text):
            ended: str | None = None
            for index, string in enumerate(stops.strings):
                progress = stops.advance(index, matched[index], character)
                if progress == len(string):
                    if ended is None or len(string) > len(ended):
                        ended = string
                    progress = 0
                matched[index] = progress
            if ended is not None:
                seen = self._held + text[: position + 1]
                self._held = ""
                self.stopped_by = ended
                return seen[: len(seen) - len(ended)]
        seen = self._held + text
        shown = len(seen) - max(matched)
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
