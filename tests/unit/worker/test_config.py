from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from octavo.cli import services
from octavo.service.settings import SettingsError

from worker_svc.config import WorkerSettings


def test_settings_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text("[worker]\nmax_num_seqs = 4\nblock_size = 4\nnum_blocks = 4\n[scheduler]\nother = 1\n")
    monkeypatch.setenv("OCTAVO_WORKER_BLOCK_SIZE", "8")
    monkeypatch.setenv("OCTAVO_WORKER_NUM_BLOCKS", "8")
    settings = WorkerSettings.load({"config_file": str(file), "num_blocks": "16"})
    kv, batch = settings.kv, settings.batch
    found = (kv.num_blocks, kv.block_size, batch.max_num_seqs, batch.max_num_batched_tokens)
    assert found == (16, 8, 4, None)


def test_settings_bind_to_loopback_and_run_no_foreign_code_by_default() -> None:
    settings = WorkerSettings.load({})
    server = settings.server
    assert (server.host, server.port, server.metrics_port) == ("127.0.0.1", 50061, 9465)
    assert not settings.vllm.trust_remote_code
    assert not settings.process.enable_faults


def test_settings_listen_takes_ipv6_and_metrics_can_be_off() -> None:
    server = WorkerSettings.load({"listen": "[::1]:0", "metrics_port": "none"}).server
    assert (server.host, server.port, server.metrics_port) == ("::1", 0, None)


def test_settings_vllm_args_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.load({"runner": "vllm", "vllm_args": '{"seed": 1}'}).vllm.vllm_args == {"seed": 1}
    monkeypatch.setenv("OCTAVO_WORKER_VLLM_ARGS", '{"seed": 2}')
    assert WorkerSettings.load({"runner": "vllm"}).vllm.vllm_args == {"seed": 2}


def test_settings_names_of_a_model_are_a_list_in_a_file_and_have_commas_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text('[worker.backend]\nserved_model_name = ["chat", "gpt-4"]\n')
    assert WorkerSettings.load({"config_file": str(file)}).backend.served_model_name == ("chat", "gpt-4")
    monkeypatch.setenv("OCTAVO_WORKER_SERVED_MODEL_NAME", "a, b")
    assert WorkerSettings.load({}).backend.served_model_name == ("a", "b")


@pytest.mark.parametrize("given", [["--served-model-name", "a", "b"], ["--served-model-name=a,b"]])
def test_settings_names_of_a_model_are_one_flag(given: list[str]) -> None:
    parser = argparse.ArgumentParser()
    services.configure(parser, "worker")
    found = vars(parser.parse_args([*given, "--runner", "sim"]))

    flags = {name.removeprefix("setting:"): value for name, value in found.items()}
    assert WorkerSettings.load(flags).backend.served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"served_model_name": "a,b,a"}, "served_model_name: names a model twice"),
        ({"blok_size": 1}, "blok_size: no such setting"),
        ({"block_size": 0}, "block_size: "),
        ({"runner": "jax"}, "runner: "),
        ({"listen": "50061"}, "listen must be host:port"),
        ({"listen": "localhost:99999"}, "listen must be host:port"),
        ({"num_blocks": 1, "kv_cache_bytes": 1}, "num_blocks and kv_cache_bytes"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "max_num_batched_tokens (32) < max_num_seqs (64)",
        ),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: "),
        ({"vllm_args": "{"}, "vllm_args: "),
        ({"quantization": "awq"}, "quantization is for the vllm runner, and the runner is torch"),
        ({"trust_remote_code": True}, "trust_remote_code is for the vllm runner, and the runner is torch"),
        (
            {"runner": "sim", "num_threads": 2},
            "num_threads is for the torch or vllm runner, and the runner is sim",
        ),
        (
            {"runner": "sim", "dtype": "float16"},
            "dtype is for the torch or vllm runner, and the runner is sim",
        ),
        (
            {"runner": "vllm", "pipeline_parallel_size": 2},
            "pipeline_parallel_size must be 1: a step's tokens are known before the next step starts",
        ),
        ({"runner": "vllm", "padded": True}, "padded is for the torch or sim runner, and the runner is vllm"),
        ({"config_file": "/no/such/file.toml"}, "/no/such/file.toml: No such file"),
    ],
)
def test_settings_that_are_wrong_are_refused_naming_them(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        WorkerSettings.load(flags)
    assert message in str(caught.value)


def test_settings_with_several_faults_names_all_of_them() -> None:
    with pytest.raises(SettingsError) as caught:
        WorkerSettings.load({"block_size": 0, "max_num_seqs": "many", "nonsense": 1})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "max_num_seqs",
        "block_size",
        "nonsense",
    ]


def test_settings_unknown_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_WORKER_BLOCKSIZE", "8")
    with pytest.raises(SettingsError, match="OCTAVO_WORKER_BLOCKSIZE"):
        WorkerSettings.load({})


@pytest.mark.parametrize("text", ["[worker]\nblocksize = 8\n", "worker = 1\n", "[worker\n"])
def test_settings_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(text)
    with pytest.raises(SettingsError):
        WorkerSettings.load({"config_file": file})
