"""Each reader takes some harmed messages, the same each time; `make fuzz` tries others."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.gateway.routes import WITH_BODY
from octavo_lab.hardening.messages import rpcs

from tests.fuzz.doors import BODIES, SEEDS
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


def test_every_method_and_every_route_with_a_body_is_fuzzed() -> None:
    methods = {path.removeprefix("/octavo.v1.") for path in (one.path for one in rpcs())}
    # One would drain the scheduler; what comes to a worker has a reader of its own.
    served = {one for one in methods if not one.startswith("Worker/")} - {"Operations/Drain"}
    assert set(SEEDS) == served
    assert set(BODIES) == set(WITH_BODY)


@pytest.mark.parametrize(("reader", "path"), FOUND, ids=[f"{one.name}-{path.name}" for one, path in FOUND])
def test_input_that_has_found_a_fault_finds_it_no_more(reader: FileReader, path: Path) -> None:
    reader.parse(path.read_bytes())
