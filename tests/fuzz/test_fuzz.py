"""Each reader takes some harmed messages, the same each time; `make fuzz` tries others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.files import file_readers
from tests.fuzz.reader import CORPUS, FileReader, fuzz
from tests.fuzz.readers import readers

READERS = readers()
SEED = 20
MESSAGES = {
    "settings": 200,
    "gguf": 200,
    "plan_log": 60,
    "worker_messages": 150,
    "scheduler_messages": 150,
    "grammars": 20,
}
"""For each reader; 300 unless a message costs more than most."""
FOUND = [(reader, path) for reader in file_readers() for path in sorted((CORPUS / reader.name).glob("*"))]


@pytest.mark.parametrize("name", READERS)
def test_reader_takes_harmed_messages(name: str, tmp_path: Path) -> None:
    most = MESSAGES.get(name, 300)
    with READERS[name] as reader:
        outcome = fuzz(reader, SEED, lambda messages, _: messages >= most, tmp_path)
    assert [path.read_text() for path in outcome.faults] == []


@pytest.mark.parametrize(("reader", "path"), FOUND, ids=[f"{one.name}-{path.name}" for one, path in FOUND])
def test_input_that_has_found_a_fault_finds_it_no_more(reader: FileReader, path: Path) -> None:
    reader.parse(path.read_bytes())
