"""The torch runner against transformers, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.protocol.steps import TokenLogprobs

from tests.unit.worker.runner.torch.conftest import LoadFamily, load_folder
from tests.unit.worker.runner.torch.driver import Driver
from tests.unit.worker.runner.torch.families import FAMILIES, save_model
from tests.unit.worker.runner.torch.parity import (
    REPORTING,
    assert_follows,
    assert_mixed_batches_follow,
    prompts,
    reference_logprobs,
)
from worker_svc.runner.torch import attention
from worker_svc.runner.torch.model import DecoderModel


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_with_random_chunks_equal_transformers(family: str, load_family: LoadFamily) -> None:
    assert_mixed_batches_follow(*load_family(family))


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_masked_attention_needs_no_kernel_that_writes_all_scores_down(
    family: str, load_family: LoadFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = attention.F.scaled_dot_product_attention
    masked = []

    def seen(*operands: Any, **how: Any) -> Any:
        if how.get("attn_mask") is not None:
            masked.append(how.get("enable_gqa", False))
        return attend(*operands, **how)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", seen)
    driver = Driver(load_family(family)[0], num_blocks=20)
    sequence = driver.add(prompts([60])[0])
    driver.step({sequence.handle: 40})
    driver.step({sequence.handle: 20})

    assert masked
    assert not any(masked)


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_block_size_does_not_change_the_tokens(block_size: int, load_family: LoadFamily) -> None:
    runner, reference = load_family("llama")
    driver = Driver(runner, num_blocks=160, block_size=block_size, seed=block_size)
    sequences = [driver.add(prompt) for prompt in prompts([3, 30, 50])]

    outputs = driver.generate(sequences, count=6, most=20)

    for sequence, output in zip(sequences, outputs, strict=True):
        expected = reference_logprobs(reference, sequence.token_ids).argmax(dim=-1).tolist()
        assert output == expected[sequence.prompt_len - 1 : sequence.prompt_len + 5]


def test_shared_prompt_blocks_serve_both_sequences(load_family: LoadFamily) -> None:
    runner, reference = load_family("llama")
    driver = Driver(runner, num_blocks=40, block_size=4)
    first_prompt, tail = prompts([16, 5])
    first = driver.add(first_prompt)
    driver.step()
    second = driver.add(first_prompt + tail)
    second.block_table = first.block_table[:4]
    second.num_computed_tokens = 16

    outputs = driver.generate([first, second], count=5)

    for sequence, output in zip([first, second], outputs, strict=True):
        expected = reference_logprobs(reference, sequence.token_ids).argmax(dim=-1).tolist()
        assert output == expected[len(sequence.token_ids) - 6 : len(sequence.token_ids) - 1]


def test_weights_split_over_several_files_are_all_found(load_family: LoadFamily, tmp_path: Path) -> None:
    reference = save_model(FAMILIES["llama"], tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    driver = Driver(load_folder(tmp_path), num_blocks=20)
    sequence = driver.add(prompts([9])[0])

    (output,) = driver.generate([sequence], count=4)

    expected = reference_logprobs(reference, sequence.token_ids).argmax(dim=-1).tolist()
    assert output == expected[8:12]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_close_to_float32(dtype: str, tmp_path: Path) -> None:
    reference = save_model(FAMILIES["qwen3"], tmp_path)
    driver = Driver(load_folder(tmp_path, dtype=dtype), num_blocks=40)
    sequences = [driver.add(prompt, REPORTING) for prompt in prompts([3, 40])]

    result = driver.step()

    for sequence in sequences:
        expected = reference_logprobs(reference, sequence.token_ids[:-1])[-1]
        report = result.logprobs[sequence.handle]
        assert report.logprob == pytest.approx(expected[report.token_id].item(), abs=0.2)
        assert expected[report.token_id] > expected.max() - 0.2


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen3"])
def test_padded_batch_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    reference = save_model(FAMILIES[family], tmp_path)
    driver = Driver(load_folder(tmp_path, padded=True), num_blocks=80, block_size=4)
    sequences = [driver.add(prompt, REPORTING) for prompt in prompts([3, 31, 1, 17])]
    driver.step()
    late = [driver.add(prompt, REPORTING) for prompt in prompts([25, 6], seed=8)]
    reports: dict[int, list[TokenLogprobs]] = {one.handle: [] for one in (*sequences, *late)}

    for _ in range(5):  # the first of these decodes some rows and pads the prompts of others
        for handle, report in driver.step().logprobs.items():
            reports[handle].append(report)

    for sequence in (*sequences, *late):
        expected = reference_logprobs(reference, sequence.token_ids[:-1])
        start = len(sequence.token_ids) - len(reports[sequence.handle])
        assert_follows(expected, start, reports[sequence.handle])


def test_padding_costs_what_static_batching_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(FAMILIES["llama"], tmp_path)
    computed: list[int] = []
    hidden = DecoderModel.hidden

    def counting(self: DecoderModel, token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        computed.append(len(token_ids))
        return hidden(self, token_ids, *args)

    monkeypatch.setattr(DecoderModel, "hidden", counting)
    for padded in (False, True):
        driver = Driver(load_folder(tmp_path, padded=padded), num_blocks=40, block_size=4)
        for prompt in prompts([3, 31, 5]):
            driver.add(prompt)
        driver.step()
        driver.step()

    assert computed == [39, 3, 93, 3]
