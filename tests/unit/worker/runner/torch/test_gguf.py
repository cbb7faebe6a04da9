"""GGUF files against the models they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from octavo.sampling import SamplingParams
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, PreTrainedModel

from tests.unit.worker.runner.torch.conftest import ignore_progress, load_gguf
from tests.unit.worker.runner.torch.driver import Driver
from tests.unit.worker.runner.torch.families import FAMILIES, save_model
from tests.unit.worker.runner.torch.gguf_models import tokenizer_metadata, write_gguf
from worker_svc.errors import ModelLoadError
from worker_svc.models.gguf_text import gguf_text
from worker_svc.models.resolve import resolve
from worker_svc.runner.torch import TorchRunner
from worker_svc.runner.torch.gguf_file import open_gguf

WIDE = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
"""Rows of a multiple of 32, as quantized blocks need."""


def continuation(runner: TorchRunner, prompt: list[int], count: int = 6) -> tuple[list[int], list[float]]:
    driver = Driver(runner, num_blocks=40, block_size=4)
    sequence = driver.add(prompt, SamplingParams(temperature=0.0, logprobs=0))
    logprobs = [driver.step().logprobs[sequence.handle].logprob for _ in range(count)]
    return sequence.token_ids[len(prompt) :], logprobs


def expected_continuation(
    model: PreTrainedModel, prompt: list[int], count: int = 6
) -> tuple[list[int], list[float]]:
    tokens = list(prompt)
    logprobs = []
    for _ in range(count):
        with torch.inference_mode():
            best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max(0)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
    return tokens[len(prompt) :], logprobs


PROMPT = [5, 17, 99, 200, 31, 31, 8]


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("llama", "llama"),
        ("llama", "llama_tied"),
        ("llama", "llama_biases"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_gguf_model_equals_the_one_it_was_made_from(architecture: str, family: str, tmp_path: Path) -> None:
    reference = save_model(FAMILIES[family], tmp_path)
    write_gguf(tmp_path / "model.gguf", reference, architecture)

    tokens, logprobs = continuation(load_gguf(tmp_path / "model.gguf"), PROMPT)

    expected, expected_logprobs = expected_continuation(reference, PROMPT)
    assert tokens == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_quantized_weights_are_read(kind: str, tmp_path: Path) -> None:
    reference = save_model(WIDE, tmp_path)
    write_gguf(tmp_path / "model.gguf", reference, "llama", kind)
    for parameter in reference.parameters():
        if parameter.ndim == 2:
            parameter.data = requantized(parameter.data, kind)

    tokens, logprobs = continuation(load_gguf(tmp_path / "model.gguf"), PROMPT)

    expected, expected_logprobs = expected_continuation(reference, PROMPT)
    assert tokens == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def requantized(weight: torch.Tensor, kind: str) -> torch.Tensor:
    stored = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(weight.numpy(), stored)
    return torch.from_numpy(gguf.quants.dequantize(packed, stored).copy())


def test_rope_factors_of_llama_3_are_applied(tmp_path: Path) -> None:
    reference = save_model(FAMILIES["llama3_rope"], tmp_path)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    factors = plain / reference.model.rotary_emb.inv_freq.float()
    assert factors.max() > 2
    write_gguf(tmp_path / "model.gguf", reference, "llama", rope_factors=factors)

    tokens, logprobs = continuation(load_gguf(tmp_path / "model.gguf"), PROMPT * 20)
    expected, expected_logprobs = expected_continuation(reference, PROMPT * 20)
    assert tokens == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"architecture_metadata": {"rope.scaling.type": "yarn"}}, "rope type yarn"),
        ({"architecture_metadata": {"expert_count": 8}}, "mixtures of experts"),
        (
            {"architecture_metadata": {"attention.sliding_window_pattern": [True, False]}},
            "in some layers only",
        ),
        ({"architecture_metadata": {"block_count": None}}, "llama.block_count is missing"),
        ({"architecture_metadata": {"attention.head_count": 0}}, "malformed metadata"),
        ({"architecture_metadata": {"rope.dimension_count": 4}}, "rotary embedding of 4 out of 16"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model llama"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer tekken"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "incomplete"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
        ({"architecture_metadata": {"embedding_length": 32}}, "has shape"),
    ],
)
def test_unusable_metadata_is_named(metadata: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    reference = save_model(WIDE, tmp_path)
    write_gguf(tmp_path / "model.gguf", reference, "llama", **metadata)

    with pytest.raises(ModelLoadError, match=complaint) as error:
        load_gguf(tmp_path / "model.gguf")
    assert "model.gguf" in str(error.value)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", save_model(WIDE, tmp_path), "gemma3")

    with pytest.raises(ModelLoadError, match="architecture gemma3 is not supported"):
        load_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_truncated_file_is_named(share: float, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, save_model(WIDE, tmp_path), "llama")
    content = whole.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: int(len(content) * share)])

    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        load_gguf(broken)


def test_file_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))

    with pytest.raises(ModelLoadError, match=r"model\.gguf: not a whole GGUF file"):
        load_gguf(tmp_path / "model.gguf")


def test_missing_weight_is_named(tmp_path: Path) -> None:
    reference = save_model(WIDE, tmp_path)
    del reference.model.layers[1].mlp.down_proj
    write_gguf(tmp_path / "model.gguf", reference, "llama")

    with pytest.raises(ModelLoadError, match=r"no weight model\.layers\.1\.mlp\.down_proj\.weight"):
        load_gguf(tmp_path / "model.gguf")


# -- the tokenizer


def tokenizer_of(**metadata: Any) -> Tokenizer:
    text = gguf_text(tokenizer_metadata() | metadata, Path("here"))
    return Tokenizer.from_str(text.tokenizer_files["tokenizer.json"].decode())


def test_tokenizer_applies_merges_and_keeps_special_tokens_whole() -> None:
    tokenizer = tokenizer_of()

    tokens = tokenizer.encode("hello world<|im_end|><think>é").tokens

    assert tokens == ["hello", "Ġw", "o", "r", "l", "d", "<|im_end|>", "<think>", "Ã", "©"]
    ids = tokenizer.encode("hello world<|im_end|><think>é").ids
    assert tokenizer.decode(ids) == "hello world<think>é"


def test_end_tokens_are_those_named_and_those_that_end_a_turn() -> None:
    text = gguf_text(tokenizer_metadata() | {"tokenizer.ggml.eot_token_id": 0}, Path("here"))

    assert text.eos_token_ids == (2, 0, 3)
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_beginning_of_sequence_is_added_when_the_file_says_so() -> None:
    with_bos = {"tokenizer.ggml.add_bos_token": True}

    assert tokenizer_of(**with_bos).encode("he").tokens == ["<s>", "he"]
    assert tokenizer_of(**with_bos).encode("he", add_special_tokens=False).tokens == ["he"]
    assert gguf_text(tokenizer_metadata() | with_bos, Path("here")).add_bos_token
    assert not gguf_text(tokenizer_metadata(), Path("here")).add_bos_token


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("llama3", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_beginning_of_sequence_is_added_by_default_where_the_pre_tokenizer_is_of_llama_3(
    name: str, said: dict[str, bool], expected: bool
) -> None:
    metadata = {"tokenizer.ggml.pre": name, **said}

    assert gguf_text(tokenizer_metadata() | metadata, Path("here")).add_bos_token is expected
    assert (tokenizer_of(**metadata).encode("he").tokens == ["<s>", "he"]) is expected


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "a  1234 b\n\nc it's", ["a", "Ġ", "Ġ1234", "Ġb", "Ċ", "Ċ", "c", "Ġit", "'s"]),
        ("smollm", "a  1234 b", ["a", "ĠĠ", "1", "2", "3", "4", "Ġb"]),
        ("dbrx", "a  1234 b", ["a", "Ġ", "Ġ", "123", "4", "Ġb"]),
        ("llama-bpe", "a  1234 b\n\nc IT'S", ["a", "Ġ", "Ġ", "123", "4", "Ġb", "ĊĊ", "c", "ĠIT", "'S"]),
        ("qwen2", "a 12 b!\n", ["a", "Ġ", "1", "2", "Ġb", "!Ċ"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_does(name: str, text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(**{"tokenizer.ggml.pre": name})

    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "Ünïcödé “quotes” … 你好世界 😀👩‍👩‍👧 नमस्ते مرحبا \u00a0\u3000",
    "  leading and trailing   \n\n \t\r\n",
    "it's we'll I'D they've <|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "e\u0301 is not \u00e9, x=1 and (2) or [3]",
    '{"json": [true, null], "url": "https://example.org/?q=a%20b&c"}',
    "",
    "\x00\x01\x7f",
]


@pytest.mark.model
def test_demo_tokenizer_equals_that_of_transformers() -> None:
    """Digits stay out: transformers forgets that this pre-tokenizer takes them one by one."""
    model = resolve("demo", ignore_progress)
    ours = Tokenizer.from_str(open_gguf(model.path).text.tokenizer_files["tokenizer.json"].decode())
    theirs = AutoTokenizer.from_pretrained(str(model.path.parent), gguf_file=model.path.name)

    for text in CORPUS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.model
def test_demo_tokenizer_takes_digits_one_by_one() -> None:
    model = resolve("demo", ignore_progress)
    tokenizer = Tokenizer.from_str(open_gguf(model.path).text.tokenizer_files["tokenizer.json"].decode())

    assert tokenizer.encode("x  2048\n\n7").tokens == ["x", "ĠĠ", "2", "0", "4", "8", "ĊĊ", "7"]
