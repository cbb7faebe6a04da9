"""`python -m tests.chaos_model FOLDER`: a model of random weights that says much in little time.

Its answers are nonsense that depends on every token before, which is all that `octavo chaos` looks at. Its
tokenizer is that of the demo model.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import LlamaConfig

from tests.unit.worker.runner.torch.families import save_model
from worker_svc.models.resolve import resolve
from worker_svc.runner.torch.gguf_file import open_gguf


def write(folder: Path) -> None:
    """Write it."""
    text = open_gguf(resolve("demo", lambda what, fraction: None).path).text
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    save_model(config, folder)
    for name, content in text.tokenizer_files.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
