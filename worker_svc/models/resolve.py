"""Finds the model that `--model` names: the demo model, a local folder or file, or a name on the hub."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped] # has no types

from worker_svc.errors import ModelLoadError
from worker_svc.models.demo_model import DEMO_MODEL_ID, DEMO_SHA256, fetch_demo_model
from worker_svc.models.files import ModelFormat, ResolvedModel
from worker_svc.models.progress import Progress

_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+(?:/[\w./-]+\.gguf)?")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja")
_HUB_CODE: Final = ("*.py",)
_HUB_DUPLICATES: Final = ("consolidated*.safetensors",)
"""The weights once more, in a layout that no runner here reads."""
_SAMPLE_BYTES: Final = 1 << 20


def resolve(
    model: str, progress: Progress, revision: str | None = None, *, with_code: bool = False
) -> ResolvedModel:
    """Return the model that `model` names, downloading it when it is not on this machine.

    `model` is `demo`, a folder, a .gguf file, a hub name `owner/name`, or one GGUF file of a hub
    repository, `owner/name/file.gguf`. What exists on disk wins over a hub name. `with_code` fetches the
    code that comes with a model, too.

    Raises:
        ModelLoadError: there is no such model, or it cannot be fetched.
    """
    if model == "demo":
        return ResolvedModel(DEMO_MODEL_ID, DEMO_SHA256[:16], ModelFormat.GGUF, fetch_demo_model(progress))
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if model.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(model):
        raise ModelLoadError(
            f"{model}: no such file or folder, and not a name on the Hugging Face hub (owner/name)"
        )
    return _from_hub(model, revision, progress, _HUB_FILES + _HUB_CODE if with_code else _HUB_FILES)


def _folder(path: Path) -> ResolvedModel:
    if (path / "config.json").is_file():
        weights = sorted(path.glob("*.safetensors"))
        name = path.resolve().name
        return ResolvedModel(
            name, _fingerprint([path / "config.json", *weights]), ModelFormat.HF_FOLDER, path
        )
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _file(found[0])
    if found:
        raise ModelLoadError(f"{path}: holds {len(found)} GGUF files; name one of them, e.g. {found[0]}")
    raise ModelLoadError(f"{path / 'config.json'}: no such file, and the folder holds no GGUF file")


def _file(path: Path) -> ResolvedModel:
    if path.suffix != ".gguf":
        raise ModelLoadError(
            f"{path}: not a model; expected a .gguf file, or a folder with config.json and safetensors"
        )
    return ResolvedModel(path.stem, _fingerprint([path]), ModelFormat.GGUF, path)


def _fingerprint(paths: Iterable[Path]) -> str:
    """Return a digest of names, sizes, heads and tails: reading whole weights would delay every start.

    The head of a weights file holds its tensor directory, the tail real weights, so fine-tuned
    siblings of one size still differ.
    """
    state = hashlib.blake2b(digest_size=8)
    for path in paths:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(_SAMPLE_BYTES)
                file.seek(max(0, size - _SAMPLE_BYTES))
                tail = file.read(_SAMPLE_BYTES)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
        state.update(f"{path.name}:{size}".encode())
        state.update(head)
        state.update(tail)
    return state.hexdigest()


def _from_hub(name: str, revision: str | None, progress: Progress, files: tuple[str, ...]) -> ResolvedModel:
    owner, repo, *file = name.split("/", 2)
    repo_id = f"{owner}/{repo}"
    bar = _hub_bar(progress, f"downloading {name}")
    progress(f"downloading {name}", 0.0)
    try:
        if file:
            path = Path(hf_hub_download(repo_id, file[0], revision=revision, tqdm_class=bar))
        else:
            path = Path(
                snapshot_download(
                    repo_id,
                    revision=revision,
                    allow_patterns=list(files),
                    ignore_patterns=list(_HUB_DUPLICATES),
                    tqdm_class=bar,
                )
            )
    except GatedRepoError as error:
        raise ModelLoadError(f"{name}: gated on the hub; accept its terms there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{name}: no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{name}: no such folder here, and no such model on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"{name}: not in the local hub cache, and the hub cannot be reached ({_first_line(error)}). "
            "Download the model where there is a network and name its folder, or use --model demo"
        ) from error
    progress(f"downloading {name}", 1.0)
    if file:
        return ResolvedModel(path.stem, _fingerprint([path]), ModelFormat.GGUF, path)
    # A snapshot's folder is named after the commit it holds.
    return ResolvedModel(name, path.name, ModelFormat.HF_FOLDER, path)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _hub_bar(progress: Progress, what: str) -> type[Any]:
    """Return a progress-bar class for the hub that reports bytes to `progress` and draws nothing."""
    lock = threading.Lock()
    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})
            self.seen = kwargs.get("initial", 0) or 0
            if self.counts_bytes:
                with lock:
                    bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.seen += n or 0
            with lock:
                total = sum(bar.total or 0 for bar in bars)
                done = sum(bar.seen for bar in bars)
            if self.counts_bytes and total:
                progress(what, min(done / total, 1.0))

        def __enter__(self) -> Self:
            return self

    return Bar
