from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from worker_svc.errors import InvalidSettings
from worker_svc.runner.vllm import installed
from worker_svc.runner.vllm.settings import VllmSettings, chosen_dtype, engine_args

MODEL = Path("model")


def args_of(on_cpu: bool = True, **settings: Any) -> dict[str, Any]:
    return engine_args(VllmSettings(MODEL, **settings), on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("dtype", "dequantized", "expected"),
    [("auto", False, "auto"), ("auto", True, "bfloat16"), ("float16", False, "float16")],
)
def test_chosen_dtype_on_a_gpu_is_the_models_own_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch, dtype: str, dequantized: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)

    assert chosen_dtype(dtype, dequantized=dequantized) == expected


def test_chosen_dtype_on_a_cpu_is_one_that_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert chosen_dtype("auto", dequantized=False) in ("bfloat16", "float32")


def test_engine_args_pass_settings_under_their_own_names() -> None:
    wanted = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "quantization": "awq",
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "trust_remote_code": True,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 96,
        "max_model_len": 1000,
        "block_size": 64,
        "gpu_memory_utilization": 0.5,
    }

    assert wanted.items() <= args_of(**wanted).items()


def test_engine_args_further_arguments_come_through() -> None:
    assert args_of(args={"swap_me": 3, "attention_backend": "X"}).items() >= {
        ("swap_me", 3),
        ("attention_backend", "X"),
    }


def test_engine_args_remote_code_is_off_unless_asked_for() -> None:
    assert args_of()["trust_remote_code"] is False


@pytest.mark.parametrize(
    "name", ["block_size", "scheduler_cls", "speculative_config", "worker_extension_cls"]
)
def test_engine_args_what_is_not_the_users_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{name} cannot be set"):
        args_of(args={name: 1})


def test_engine_args_pipeline_stages_are_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidSettings, match=r"pipeline_parallel_size must be 1.*tensor_parallel_size"):
        args_of(args={"pipeline_parallel_size": 2})


def test_engine_args_block_size_that_a_cpu_cannot_have_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="block_size that is a multiple of 32, got 16"):
        args_of(block_size=16)
    assert args_of(on_cpu=False, block_size=16)["block_size"] == 16


def test_engine_args_adapters_make_room_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()

    args = args_of(on_cpu=False, args={"lora_modules": {"poet": str(tmp_path)}})

    assert args["enable_lora"] is True
    assert args["max_loras"] == 1
    assert "lora_modules" not in args


def test_engine_args_adapters_on_a_cpu_leave_a_slot_for_rows_without_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()

    assert args_of(args={"lora_modules": {"poet": str(tmp_path)}})["max_loras"] == 2


@pytest.mark.parametrize(
    ("modules", "problem"),
    [(["poet"], "must be an object"), ({"poet": "nowhere"}, "poet: no adapter_config.json in nowhere")],
)
def test_engine_args_adapters_that_are_none_are_refused(modules: object, problem: str) -> None:
    with pytest.raises(InvalidSettings, match=problem):
        args_of(args={"lora_modules": modules})


def test_prepare_without_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "DISTRIBUTIONS", ("no-such-distribution",))

    with pytest.raises(InvalidSettings, match=re.escape("pip install octavo[vllm]")):
        installed.prepare()


def test_prepare_with_another_version_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda: "0.31.1")

    with pytest.raises(InvalidSettings, match=r"vLLM 0\.31\.1 is installed.*0\.32\.0"):
        installed.prepare()
