"""Stop strings in a stream: found wherever the deltas are cut, never shown."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.text.detokenizer import StopMatcher, StopStrings


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that ends first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_matcher_any_cut_shows_what_the_whole_text_would(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    shown = ""
    for start, end in pairwise(edges):
        shown += matcher.feed(text[start:end])
        if matcher.stopped_by is not None:
            break
        # What is held back is never more than a stop string that has begun.
        assert text[:end].startswith(shown)
        assert end - len(shown) < max(map(len, stops))
    if matcher.stopped_by is None:
        shown += matcher.flush()
    assert (shown, matcher.stopped_by) == reference(text, stops)


def test_matcher_text_without_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(StopStrings(["\n\n", "###"]))
    assert matcher.feed("hello") == "hello"
    assert matcher.feed(" world\n") == " world"
    assert matcher.feed("more") == "\nmore"


def test_matcher_flush_gives_a_begun_stop_string_back_once() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.feed("the EN") == "the "
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""
