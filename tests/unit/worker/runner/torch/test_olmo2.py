"""OLMo 2 against transformers, from both formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Olmo2Config, PreTrainedModel

from tests.unit.worker.runner.torch.conftest import load_folder, load_gguf
from tests.unit.worker.runner.torch.families import save_model
from tests.unit.worker.runner.torch.gguf_models import write_gguf
from tests.unit.worker.runner.torch.parity import assert_mixed_batches_follow

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(params=[2, 6], ids=["grouped", "multi_head"])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    """A random model, saved as a folder."""
    return save_model(Olmo2Config(**SHAPE, num_key_value_heads=request.param), tmp_path)


def test_folder_equals_transformers(reference: PreTrainedModel, tmp_path: Path) -> None:
    assert_mixed_batches_follow(load_folder(tmp_path), reference)


def test_gguf_file_equals_transformers(reference: PreTrainedModel, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference, "olmo2")

    assert_mixed_batches_follow(load_gguf(tmp_path / "model.gguf"), reference)
