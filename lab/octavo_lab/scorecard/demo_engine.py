"""The demo model in float32: in a worker's engine on the torch runner, and as transformers runs it."""

# ruff: noqa: PLC0415 - torch and transformers take seconds to import

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from worker_svc.engine.engine import WorkerEngine

BLOCK_SIZE: Final = 16


def demo_engine(max_num_seqs: int, max_model_len: int, *, static: bool = False) -> tuple[int, WorkerEngine]:
    """Return the size of the vocabulary, and an engine that holds so many sequences at their longest.

    With `static` it is as the control arm has it: padded rows in contiguous memory.
    """
    from worker_svc.engine.engine import EngineConfig, WorkerEngine
    from worker_svc.models.resolve import resolve
    from worker_svc.runner.torch import TorchOptions, load

    options = TorchOptions(device="cpu", dtype="float32", padded=static)
    runner = load(resolve("demo", _ignore), options, _ignore)
    num_blocks = max_num_seqs * -(-(max_model_len + 1) // BLOCK_SIZE)
    runner.allocate(num_blocks, BLOCK_SIZE, 0)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=runner.info.text.eos_token_ids,
        paged=not static,
    )
    return runner.info.vocab_size, WorkerEngine(runner, config)


def transformers_model() -> Any:
    """Return the model as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    from worker_svc.models.demo_model import demo_model_path

    path = demo_model_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def _ignore(what: str, fraction: float) -> None:
    """Show no progress."""
