"""What a model folder may lack or get wrong: refused by name, before anything is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.runner.torch.conftest import ignore_progress, load_folder
from tests.unit.worker.runner.torch.families import FAMILIES, save_model
from worker_svc.errors import InvalidSettings, ModelLoadError
from worker_svc.models.resolve import resolve
from worker_svc.runner.torch import runner as runner_module
from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.hf_folder import open_hf_folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROJECTION = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model(FAMILIES["llama"], folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model of its own, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def set_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def set_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_folder(folder).close()
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_description_tells_the_device_that_memory_is_sized_by(folder: Path, device: str) -> None:
    model = resolve(str(folder), ignore_progress)
    compute = Compute(torch.device(device), torch.float32, torch.float32)

    assert runner_module.describe(model, open_hf_folder(folder), compute, 64).device == device


@pytest.mark.parametrize(
    "raised",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        MemoryError("no more"),
    ],
)
def test_model_that_does_not_fit_into_memory_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(runner_module, "DecoderModel", fail)
    message = refusal(folder)
    assert str(folder) in message
    assert str(raised) in message


def test_largest_step_that_does_not_fit_beside_the_weights_is_told_with_its_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = load_folder(folder, max_num_batched_tokens=96)
    monkeypatch.setattr(runner_module, "gpu_bytes_beside_kv", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    monkeypatch.setattr(runner, "_compute", Compute(torch.device("cuda"), torch.float32, torch.float32))

    with pytest.raises(InvalidSettings, match="a step of 96 tokens"):
        runner.available_kv_bytes(0.9)


def test_folder_as_it_was_saved_loads(folder: Path) -> None:
    runner = load_folder(folder)
    assert runner.info.vocab_size == 300
    runner.close()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_file_that_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"", b"[1, 2]", b"\xff\xfe{}"])
def test_json_file_that_is_damaged_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert str(folder / name) in refusal(folder)


def test_folder_without_weights_says_so(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "no safetensors file" in refusal(folder)


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    assert "pytorch_model.bin is a pickle, which is never loaded" in refusal(folder)


@pytest.mark.parametrize("left", [0, 4, 100, -1000, -1])
def test_weights_file_that_is_cut_off_is_named(folder: Path, left: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:left])
    message = refusal(folder)
    assert str(path) in message
    assert "damaged or truncated" in message


def test_weights_file_of_noise_is_named(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 16)
    assert f"{folder / WEIGHTS}: damaged or truncated" in refusal(folder)


def test_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {PROJECTION: "model-2.safetensors"}}))
    assert f"{folder / 'model-2.safetensors'}: no such file" in refusal(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "nothing"])
def test_index_of_shards_that_is_damaged_is_named(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert INDEX in refusal(folder)


def test_weight_that_is_missing_is_named(folder: Path) -> None:
    set_weights(folder, lambda weights: weights.pop(PROJECTION))  # type: ignore[arg-type, return-value]
    assert f"no weight {PROJECTION}" in refusal(folder)


def test_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    set_weights(folder, lambda weights: weights.update({PROJECTION: torch.zeros(48, 79)}))
    message = refusal(folder)
    assert f"{PROJECTION} has shape [48, 79]" in message
    assert "[48, 80]" in message


def test_weight_of_integers_is_named(folder: Path) -> None:
    set_weights(folder, lambda weights: weights.update({PROJECTION: torch.zeros(48, 80, dtype=torch.int8)}))
    assert f"{PROJECTION} has type torch.int8" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": 3}, "rope_scaling must be an object"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "three"}, "three"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        ({"num_attention_heads": 0}, "division"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4 KV heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": 301}, "has shape [300, 48]"),
    ],
)
def test_configuration_that_cannot_be_served_says_why(
    folder: Path, fields: dict[str, Any], complaint: str
) -> None:
    set_config(folder, **fields)
    message = refusal(folder)
    assert complaint in message
    assert str(folder) in message
