"""All readers that are fuzzed."""

from __future__ import annotations

from tests.fuzz.doors import door_readers
from tests.fuzz.files import file_readers
from tests.fuzz.grammars import GrammarReader
from tests.fuzz.reader import Reader
from tests.fuzz.streams import stream_readers


def readers() -> dict[str, Reader]:
    """Return every reader by its name."""
    return {one.name: one for one in (*file_readers(), *stream_readers(), *door_readers(), GrammarReader())}
