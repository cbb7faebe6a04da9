from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.worker.runner.torch.families import FAMILIES, save_model
from worker_svc.models.resolve import resolve
from worker_svc.runner.torch import TorchOptions, TorchRunner, load


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and the tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LoadFamily = Callable[[str], tuple[TorchRunner, PreTrainedModel]]


@pytest.fixture
def load_family(tmp_path: Path) -> LoadFamily:
    """Return a function from a family's name to a float32 runner and its transformers reference."""

    def make(name: str) -> tuple[TorchRunner, PreTrainedModel]:
        reference = save_model(FAMILIES[name], tmp_path / name)
        return load_folder(tmp_path / name), reference

    return make


def load_folder(folder: Path, **options: object) -> TorchRunner:
    chosen = TorchOptions(**{"device": "cpu", "dtype": "float32", **options})  # type: ignore[arg-type]
    return load(resolve(str(folder), ignore_progress), chosen, ignore_progress)


def load_gguf(path: Path, dtype: str = "float32") -> TorchRunner:
    return load(resolve(str(path), ignore_progress), TorchOptions(device="cpu", dtype=dtype), ignore_progress)


def ignore_progress(what: str, fraction: float) -> None:
    pass
