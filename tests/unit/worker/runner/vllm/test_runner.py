from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.sampling import SamplingParams
from safetensors.torch import save_file
from transformers import LlamaConfig, MambaConfig, PreTrainedConfig

from tests.unit.worker.runner.torch.driver import GREEDY, Driver
from tests.unit.worker.runner.torch.families import VOCAB_SIZE, save_model
from worker_svc.config import WorkerSettings
from worker_svc.errors import (
    DeviceLost,
    InvalidSettings,
    ModelLoadError,
    NotFinite,
    StepFailed,
    StepOutOfMemory,
)
from worker_svc.runner.base import BlockCopy, ModelRunner, StepBatch
from worker_svc.runner.vllm.runner import VllmRunner
from worker_svc.start.load import load_runner

pytestmark = [
    pytest.mark.vllm,
    # vLLM warns about itself while it is imported.
    pytest.mark.filterwarnings("ignore"),
]
NUM_BLOCKS = 16
BLOCK_SIZE = 32
HIDDEN = 64
LAYERS = 2
PROMPT = list(range(10, 60))


def save(folder: Path, config: PreTrainedConfig | None = None) -> Path:
    save_model(
        config
        or LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.2,
        ),
        folder,
    )
    return folder


def load(folder: Path, **settings: Any) -> ModelRunner:
    chosen = {
        "model": str(folder),
        "runner": "vllm",
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        **settings,
    }
    return load_runner(WorkerSettings.load(chosen), lambda what, fraction: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[VllmRunner]:
    runner = load(folder)
    assert isinstance(runner, VllmRunner)
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE, 0)
    yield runner
    runner.close()


class Drive(Driver):
    """The torch runner's driver over a runner that has its memory."""

    def __init__(self, runner: VllmRunner, num_blocks: int = NUM_BLOCKS) -> None:
        allocate, runner.allocate = runner.allocate, lambda *sizes: None  # type: ignore[method-assign]
        super().__init__(runner, num_blocks, BLOCK_SIZE)
        runner.allocate = allocate  # type: ignore[method-assign]

    def finish(self) -> None:
        for sequence in list(self.live.values()):
            self.remove(sequence)
        self.step()


@pytest.fixture
def drive(loaded: VllmRunner) -> Iterator[Drive]:
    driver = Drive(loaded)
    yield driver
    driver.finish()


def test_runner_describes_what_vllm_loaded(loaded: VllmRunner) -> None:
    info = loaded.info

    assert (info.runner, info.dtype, info.kv_dtype, info.device) == ("vllm", "float32", "float32", "cpu")
    assert (info.vocab_size, info.max_model_len) == (VOCAB_SIZE, 256)
    assert info.kv_bytes_per_token == LAYERS * 2 * HIDDEN * 4
    assert info.text.eos_token_ids == (2,)
    assert "tokenizer.json" in info.text.tokenizer_files


def test_available_kv_bytes_grow_with_the_share(loaded: VllmRunner) -> None:
    assert loaded.available_kv_bytes(0.5) > loaded.available_kv_bytes(0.25)


@pytest.mark.parametrize("error", [StepFailed("made up"), StepOutOfMemory("made up")])
def test_execute_after_a_failed_step_sequences_go_on_as_if_nothing_was(
    drive: Drive, loaded: VllmRunner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    sampled = SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.2)
    undisturbed = [drive.generate([drive.add(PROMPT, sampling)], 12)[0] for sampling in (GREEDY, sampled)]
    sequences = [drive.add(PROMPT, sampling) for sampling in (GREEDY, sampled)]
    first = drive.generate(sequences, 6)
    engine_step = loaded._engine.step

    def step_and_fail(*args: Any) -> Any:
        engine_step(*args)  # vLLM's rows have advanced, ours have not
        raise error

    monkeypatch.setattr(loaded._engine, "step", step_and_fail)
    with pytest.raises(type(error)):
        drive.step({sequence.handle: 1 for sequence in sequences})
    monkeypatch.undo()

    rest = drive.generate(sequences, 6)

    assert [one + other for one, other in zip(first, rest, strict=True)] == undisturbed


def test_execute_a_fault_inside_vllm_names_it_and_harms_nobody_else(
    drive: Drive, loaded: VllmRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drive.generate([drive.add(PROMPT)], 8)[0]
    sequence = drive.add(PROMPT)
    first = drive.generate([sequence], 4)[0]
    sampler = loaded._engine._executor.driver_worker.worker.model_runner.sampler

    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("the sampler broke")

    monkeypatch.setattr(sampler, "forward", broken)
    with pytest.raises(StepFailed, match="the sampler broke"):
        drive.step({sequence.handle: 1})
    monkeypatch.undo()

    assert first + drive.generate([sequence], 4)[0] == expected


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError("no more"), StepOutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), StepOutOfMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost),
    ],
)
def test_execute_faults_are_told_apart(
    drive: Drive,
    loaded: VllmRunner,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    expected: type[Exception],
) -> None:
    sequence = drive.add(PROMPT)

    def fail(*arguments: Any) -> Any:
        raise raised

    monkeypatch.setattr(loaded._engine._executor.driver_worker.worker.model_runner, "execute_model", fail)
    with pytest.raises(expected):
        drive.step({sequence.handle: 50})


def test_execute_token_outside_the_vocabulary_names_the_culprit(drive: Drive) -> None:
    good, bad = drive.add(PROMPT), drive.add([5, VOCAB_SIZE])

    with pytest.raises(StepFailed, match="outside the vocabulary") as caught:
        drive.step({good.handle: 10, bad.handle: 2})

    assert caught.value.handles == (bad.handle,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_execute_names_the_sequences_whose_logits_are_not_finite(
    drive: Drive, loaded: VllmRunner, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    sampled = SamplingParams(temperature=1.0, seed=4, top_p=0.9)
    expected = drive.generate([drive.add(PROMPT, sampling) for sampling in (GREEDY, sampled)], 6)
    for sequence in list(drive.live.values()):
        drive.remove(sequence)
    model_runner = loaded._engine._executor.driver_worker.worker.model_runner
    compute = model_runner.model.compute_logits
    bad: list[int] = []

    def broken(*arguments: Any, **more: Any) -> Any:
        logits = compute(*arguments, **more)
        for handle in bad:
            if (tracked := loaded._tracked.get(handle)) is not None:
                logits[model_runner.input_batch.req_id_to_index[tracked.req_id], 3] = value
        return logits

    monkeypatch.setattr(model_runner.model, "compute_logits", broken)
    good = [drive.add(PROMPT, sampling) for sampling in (GREEDY, sampled)]
    others = [drive.add(PROMPT, sampling) for sampling in (GREEDY, sampled)]
    begun = drive.generate([*good, *others], 3)
    bad += [sequence.handle for sequence in others]

    with pytest.raises(NotFinite) as caught:
        drive.step()

    assert caught.value.handles == tuple(bad)
    for sequence in others:
        drive.remove(sequence)
    assert [one + more for one, more in zip(begun[:2], drive.generate(good, 3), strict=True)] == expected


def test_execute_unknown_adapter_names_the_culprit(drive: Drive) -> None:
    sequence = drive.add(PROMPT)
    sequence.adapter = "nobody"

    with pytest.raises(StepFailed, match="no adapter nobody") as caught:
        drive.step({sequence.handle: 10})

    assert caught.value.handles == (sequence.handle,)


def test_execute_held_row_at_the_end_of_the_context_computes_nothing_more(drive: Drive) -> None:
    sequence = drive.add([9] * 255)
    drive.step()
    assert len(sequence.token_ids) == 256
    sequence.held = True

    drive.live.clear()
    result = drive.runner.execute(StepBatch((drive.row(sequence, 1),)))

    assert set(result.token_ids) == {sequence.handle}
    drive.live[sequence.handle] = sequence


def test_execute_forgets_what_was_removed(drive: Drive, loaded: VllmRunner) -> None:
    drive.generate([drive.add(PROMPT) for _ in range(3)], 2)

    drive.finish()

    runner = loaded._engine._executor.driver_worker.worker.model_runner
    assert runner.requests == {}
    assert runner.input_batch.num_reqs == 0


def test_allocate_other_block_size_is_refused(loaded: VllmRunner) -> None:
    with pytest.raises(InvalidSettings, match="32"):
        loaded.allocate(NUM_BLOCKS, 64, 0)


def test_small_pool_shortens_the_context_and_a_host_tier_holds_its_blocks(folder: Path) -> None:
    runner = load(folder)
    assert isinstance(runner, VllmRunner)
    try:
        runner.allocate(4, BLOCK_SIZE, 3)
        assert runner.info.max_model_len == 4 * BLOCK_SIZE
        driver = Drive(runner, 4)
        first = driver.add(PROMPT)
        expected = driver.generate([first], 5)
        block = first.block_table[0]
        runner.copy_to_host([BlockCopy(block, 2)])
        driver.remove(first)
        longest = driver.add([9] * (4 * BLOCK_SIZE - 1))
        driver.step()
        longest.held = True
        assert longest.handle in driver.runner.execute(StepBatch((driver.row(longest, 1),))).token_ids
        driver.remove(longest)
        again = driver.add(PROMPT)
        again.block_table = [driver.free.pop()]
        ticket = runner.copy_to_device([BlockCopy(again.block_table[0], 2)])
        assert ticket.done()
        assert ticket.elapsed_s() > 0
        again.num_computed_tokens = BLOCK_SIZE
        assert driver.generate([again], 5) == expected
    finally:
        runner.close()


@pytest.mark.parametrize(
    "raised", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 bytes")]
)
def test_allocate_out_of_memory_in_a_rank_is_told_as_such(
    loaded: VllmRunner, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(loaded._engine._executor, "initialize_from_config", fail)

    with pytest.raises(MemoryError, match="memory"):
        loaded.allocate(NUM_BLOCKS, BLOCK_SIZE, 0)


def test_load_out_of_memory_in_the_largest_step_is_a_model_that_cannot_be_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker_svc.runner.vllm.internals import StepExtension  # noqa: PLC0415 - needs vLLM

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepExtension, "octavo_memory", fail)

    with pytest.raises(ModelLoadError, match="largest step: out of memory"):
        load(folder)


def test_load_state_space_model_is_refused_by_name(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=8)

    with pytest.raises(InvalidSettings, match="MambaForCausalLM"):
        load(save(tmp_path, config))


def test_load_argument_that_vllm_does_not_know_is_named(folder: Path) -> None:
    with pytest.raises(InvalidSettings, match="no_such_thing"):
        load(folder, vllm_args={"no_such_thing": 1})


def test_load_ray_without_ray_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidSettings, match="pip install ray"):
        load(folder, vllm_args={"distributed_executor_backend": "ray"})


def test_load_broken_weights_name_the_folder(tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load(tmp_path)


def test_load_adapter_changes_only_the_sequences_that_name_it(folder: Path, tmp_path: Path) -> None:
    _save_adapter(tmp_path)
    runner = load(folder, vllm_args={"lora_modules": {"poet": str(tmp_path)}, "max_lora_rank": 8})
    assert isinstance(runner, VllmRunner)
    try:
        runner.allocate(NUM_BLOCKS, BLOCK_SIZE, 0)
        drive = Drive(runner)
        alone = drive.generate([drive.add(PROMPT)], 8)[0]
        plain, poet = drive.add(PROMPT), drive.add(PROMPT)
        poet.adapter = "poet"

        plain_tokens, poet_tokens = drive.generate([plain, poet], 8)

        assert runner.info.adapters == ("poet",)
        assert plain_tokens == alone
        assert poet_tokens != alone
    finally:
        runner.close()


def _save_adapter(folder: Path) -> None:
    """Save a LoRA adapter with random weights, as peft does."""
    torch.manual_seed(3)
    weights = {}
    for layer in range(LAYERS):
        for projection in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, HIDDEN)
            weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, 8)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
