"""Readers of files: keys, settings, batches and their outcomes, models, plan logs."""

from __future__ import annotations

import atexit
import base64
import json
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jwt
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from gguf import GGUFWriter
from octavo.batch_file import BatchFileError, OutcomeFile, read_requests, throughput_order
from octavo.keys import KeyFile, KeyFileError, hash_of
from octavo.sampling import SamplingParams
from octavo.service.settings import SettingsError
from octavo.steptimes import StepTimes
from octavo_lab.sim import SimCell, SimWorkerConfig
from safetensors.torch import save_file

from scheduler_svc.admission.tokens import Tokens
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core import CoreConfig, NewRequest
from scheduler_svc.planlog import PlanLogError, PlanLogWriter, RecordingCore, replay
from scheduler_svc.planlog.writer import FRAME, MAGIC
from tests.fuzz.mutations import harmed
from tests.fuzz.reader import FileReader
from worker_svc.errors import ModelLoadError
from worker_svc.models.gguf import open_gguf_file
from worker_svc.runner.torch.hf_folder import open_hf_folder

FOLDER = Path(tempfile.mkdtemp(prefix="octavo-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

KEYS = f"""
[tenants.acme]
weight = 2.5
requests_in_flight = 8
tokens_per_minute = 3000

[[keys]]
id = "acme-1"
hash = "{hash_of("octavo_" + "a" * 43)}"
tenant = "acme"
roles = ["user", "operator"]
""".encode()

SETTINGS = b"""
[scheduler]
listen = "127.0.0.1:0"
workers = ["127.0.0.1:1", "127.0.0.1:2"]
max_waiting_requests = 500

[scheduler.planning]
window = 2
"""

_CHAT = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
}
BATCH = b"""
{"id": "1", "prompt": "a", "max_tokens": 3, "logit_bias": {"5": 1.5}, "stop": ["x"], "seed": 7}
{"prompt": [1, 2, 3], "temperature": 0.5}
""" + json.dumps({"custom_id": "2", "url": "/v1/chat/completions", "body": _CHAT}).encode()

OUTCOMES = b"""{"id": "1", "digest": "abc", "choices": []}
{"id": "2", "digest": "def", "error": {"reason": "POISON"}}
"""


def file_readers() -> list[FileReader]:
    """Return one reader for each kind of file."""
    return [
        FileReader("key_file", [KEYS], _keys),
        FileReader("settings", [SETTINGS], _settings),
        FileReader("jwt", [b'{"alg": "ES256", "typ": "JWT", "kid": "one"}', b"e30.e30.e30"], TokenReader()),
        FileReader("batch_requests", [BATCH], _batch),
        FileReader("batch_outcomes", [OUTCOMES], _outcomes),
        FileReader("gguf", [_gguf()], _read_gguf),
        FileReader("safetensors", [_safetensors()], _read_safetensors),
        FileReader("model_config", [json.dumps(CONFIG).encode()], _read_config),
        PlanLogFuzz(),
    ]


def _written(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def _reads(read: Callable[[], object], *allowed: type[Exception]) -> None:
    with suppress(*allowed):
        read()


def _keys(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    _reads(lambda: KeyFile.parse(text), KeyFileError)


@dataclass
class TokenReader:
    """Reads the heads of tokens (JWT), which anybody can make."""

    jwt_issuer: str = "https://login.example"
    jwt_audience: str = "octavo"
    jwt_tenant_claim: str = "tenant"

    def __post_init__(self) -> None:
        public = ec.generate_private_key(ec.SECP256R1()).public_key()
        key = {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(public)), "kid": "one", "alg": "ES256"}
        self.jwt_jwks = str(_written("jwks.json", json.dumps({"keys": [key]}).encode()))
        self._tokens = Tokens(self)

    def __call__(self, data: bytes) -> None:
        self._tokens.find(f"{base64.urlsafe_b64encode(data).decode()}.e30.AAAA", {})
        self._tokens.find(data.decode(errors="replace"), {})


def _settings(data: bytes) -> None:
    path = _written("settings.toml", data)
    _reads(lambda: SchedulerSettings.load({"config_file": path}).core_config(), SettingsError)


def _batch(data: bytes) -> None:
    path = _written("batch.jsonl", data)
    _reads(lambda: throughput_order(read_requests(path, {})), BatchFileError)


def _outcomes(data: bytes) -> None:
    path = _written("outcomes.jsonl", data)

    def read() -> None:
        with OutcomeFile(path):
            pass

    _reads(read, BatchFileError)


# Models ------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "float32",
    "hidden_act": "silu",
}  # fmt: skip


def _gguf() -> bytes:
    path = FOLDER / "seed.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.context_length", 64)
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0, -1.0])
    writer.add_tensor("token_embd.weight", torch.ones(4, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _read_gguf(data: bytes) -> None:
    path = _written("model.gguf", data)

    def read() -> None:
        opened = open_gguf_file(path)
        for name in opened.tensors:
            opened.read(name)

    _reads(read, ModelLoadError)


def _safetensors() -> bytes:
    path = FOLDER / "seed.safetensors"
    save_file({"model.norm.weight": torch.ones(16), "lm_head.weight": torch.ones(4, 4)}, path)
    return path.read_bytes()


def _hf_folder(config: bytes, weights: bytes) -> None:
    folder = FOLDER / "hf"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)

    def read() -> None:
        checkpoint = open_hf_folder(folder)
        for name in checkpoint.names:
            checkpoint.read(name)

    _reads(read, ModelLoadError)


def _read_safetensors(data: bytes) -> None:
    _hf_folder(json.dumps(CONFIG).encode(), data)


def _read_config(data: bytes) -> None:
    _hf_folder(data, _WEIGHTS)


_WEIGHTS = _safetensors()


# Plan logs ---------------------------------------------------------------------------------------


class PlanLogFuzz(FileReader):
    """Harms the bytes of a log, or the messages in it under checksums that are right."""

    def __init__(self) -> None:
        super().__init__("plan_log", [path.read_bytes() for path in _plan_logs()], _replay)

    def episode(self, rng: random.Random) -> None:
        if rng.random() < 0.3:
            super().episode(rng)
            return
        records = _records(rng.choice(self.seeds))
        for _ in range(rng.randint(1, 3)):
            at = 0 if rng.random() < 0.3 else rng.randrange(len(records))
            records[at] = harmed(rng, records[at], records, message=True)
        frames = (FRAME.pack(len(one), zlib.crc32(one)) + one for one in records)
        data = b"".join((MAGIC, *frames))
        self.read.append(data)
        self.parse(data)


def _plan_logs() -> list[Path]:
    """Record a run into small files, so that all but the first begin with the state of a core."""
    path = FOLDER / "plan.log"
    config = SimWorkerConfig(
        worker_id="w0",
        step_times=StepTimes.builtin(),
        num_blocks=16,
        max_num_seqs=4,
        max_model_len=256,
    )
    core = RecordingCore(CoreConfig(), PlanLogWriter(path, max_bytes=8000, files=100))
    try:
        cell = SimCell(core, [config])
        for number in range(6):
            sampling = SamplingParams(n=1 + number % 2, seed=number, max_tokens=12, temperature=0.7)
            spec = NewRequest(
                request_id=f"r{number}", model="sim", prompt_token_ids=range(60), sampling=sampling
            )
            cell.submit_at(1.0 + number * 1e-2, spec)
        cell.loop.run(until=60.0)
    finally:
        core.close()
    return sorted(FOLDER.glob("plan*.log*"))[:3]


def _records(data: bytes) -> list[bytes]:
    """Return the records of a log, those of a corpus file as far as they are whole."""
    found, at = [], len(MAGIC)
    while at + FRAME.size <= len(data):
        length, _ = FRAME.unpack_from(data, at)
        found.append(data[at + FRAME.size : at + FRAME.size + length])
        at += FRAME.size + length
    return found


def _replay(data: bytes) -> None:
    path = _written("harmed.log", data)
    _reads(lambda: replay(path), PlanLogError)
