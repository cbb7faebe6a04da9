"""lm-eval, unmodified, against the gateway: its scores are those that transformers give."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_lab.scorecard import system
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.unit.worker.runner.torch.families import save_model, small_llama

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/lm-eval/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.exists() or os.environ.get("OCTAVO_REQUIRE_CLIENTS")),
        reason="lm-eval is not installed: make lm-eval",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    model = save_model(small_llama(512), folder)
    special = {"eos_token": "</s>", "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special).save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def outcome(model: tuple[Path, PreTrainedModel]) -> Any:
    folder, _ = model
    worker = ("--runner", "torch", "--dtype", "float32", "--device", "cpu", "--num-blocks", "64")
    with system.running(model=str(folder), worker_args=worker, gateway_port=0) as stack:
        url = f"{system.base_url(stack)}/v1"
        script = ROOT / "tests/clients/lm_eval_client.py"
        done = subprocess.run(
            [PYTHON, script, url, folder.name, folder],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets"), "HOME": str(folder)},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OCTAVO ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("OCTAVO "))


def tokens(folder: Path, text: str) -> list[int]:
    ids: list[int] = PreTrainedTokenizerFast.from_pretrained(folder).encode(text, add_special_tokens=False)
    return ids


def test_log_likelihoods_are_those_of_transformers(model: tuple[Path, PreTrainedModel], outcome: Any) -> None:
    folder, reference = model
    correct = []
    for sample in outcome["samples"]["octavo_choices"]:
        expected = []
        for ending, said in zip(sample["doc"]["choices"], sample["said"], strict=True):
            context, rest = tokens(folder, sample["doc"]["question"]), tokens(folder, ending)
            with torch.inference_mode():
                logits = reference(torch.tensor([context + rest[:-1]])).logits[0, len(context) - 1 :]
            of_rest = logits.log_softmax(dim=-1).gather(1, torch.tensor(rest).unsqueeze(1))
            expected.append(of_rest.sum().item())
            value = float(said[0] if isinstance(said, list) else said)
            assert value == pytest.approx(expected[-1], abs=1e-2)
        correct.append(expected.index(max(expected)) == sample["doc"]["answer"])
    score = outcome["results"]["octavo_choices"]["acc,none"]
    assert score == pytest.approx(sum(correct) / len(correct))


def test_generations_are_those_of_transformers(model: tuple[Path, PreTrainedModel], outcome: Any) -> None:
    folder, reference = model
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for sample in outcome["samples"]["octavo_generates"]:
        prompt = torch.tensor([tokens(folder, sample["doc"]["question"])])
        with torch.inference_mode():
            ids = reference.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        said = tokenizer.decode(ids, skip_special_tokens=True).split("\n\n")[0]
        assert sample["said"] == [said]
