"""Where sampling defaults come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from octavo.sampling import SamplingParams

from worker_svc.errors import ModelLoadError
from worker_svc.models.demo_model import DEMO_FILE
from worker_svc.models.generation import config_defaults, gguf_defaults

METADATA = {
    "general.sampling.temp": 0.699999988079071,
    "general.sampling.top_k": 20,
    "general.sampling.penalty_repeat": 1.0499999523162842,
    "general.name": "a model",
}
"""Numbers as a GGUF file keeps them, in 32 bits."""


def test_config_says_what_it_has_of_sampling_and_nothing_else() -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": None,
        "eos_token_id": 2,
        "max_length": 9,
    }

    assert config_defaults(config, "here") == SamplingParams(temperature=0.6, top_p=0.95, top_k=0)


def test_config_that_says_greedy_has_leftovers_that_do_not_count() -> None:
    config = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}

    assert config_defaults(config, "here") == SamplingParams(repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"temperature": "hot"}, "here: temperature must be a number, is 'hot'"),
        ({"top_p": True}, "here: top_p must be a number, is True"),
        ({"temperature": float("nan")}, "here: temperature must be a number, is nan"),
        ({"top_p": 1.5}, "here: top_p must be a finite number in (0, 1], got 1.5"),
    ],
)
def test_config_with_a_value_that_cannot_be_sampled_with_is_refused(
    config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelLoadError) as refused:
        config_defaults(config, "here")
    assert str(refused.value) == problem


def test_gguf_metadata_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = gguf_defaults(METADATA, tmp_path / "model.gguf")

    assert found == SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.05)


@pytest.mark.parametrize("name", ["generation_config.json", "model.Q4_1.generation_config.json"])
def test_gguf_file_beside_says_all_that_there_is_to_say(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps({"top_p": 0.5}))

    assert gguf_defaults(METADATA, tmp_path / "model.Q4_1.gguf") == SamplingParams(top_p=0.5)


def test_gguf_file_beside_of_its_own_name_comes_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    (tmp_path / "a.generation_config.json").write_text(json.dumps({"top_p": 0.25}))

    assert gguf_defaults({}, tmp_path / "a.gguf") == SamplingParams(top_p=0.25)
    assert gguf_defaults({}, tmp_path / "b.gguf") == SamplingParams(top_p=0.5)


def test_gguf_file_beside_that_is_damaged_is_named(tmp_path: Path) -> None:
    beside = tmp_path / "a.generation_config.json"
    beside.write_text("{")

    with pytest.raises(ModelLoadError, match=str(beside)):
        gguf_defaults({}, tmp_path / "a.gguf")


def test_demo_model_samples_as_its_model_card_does_unless_a_file_beside_it_says_otherwise(
    tmp_path: Path,
) -> None:
    assert gguf_defaults({}, tmp_path / DEMO_FILE) == SamplingParams(temperature=0.2, top_p=0.9)

    (tmp_path / "generation_config.json").write_text('{"temperature": 0.8}')
    assert gguf_defaults({}, tmp_path / DEMO_FILE) == SamplingParams(temperature=0.8)
