"""`octavo tune`, as one types it, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest
from octavo.cli.main import main
from octavo_lab.tune import command as tune
from octavo_lab.tune.search import Settings, Trial

from worker_svc.config import WorkerSettings

WORDS = ("tune", "--ttft", "1s", "--max-num-seqs", "4,8,16", "--simulate", "2048")


class Interrupted:
    """Keeps every rate for so many trials; then somebody types Ctrl-C."""

    def __init__(self, trials: int) -> None:
        self._left = trials

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return Trial(settings, rate_per_s, True, 500, False, 0.1, 0.01, 100.0)


@pytest.mark.parametrize("trials", [0, 3])
def test_ctrl_c_ends_the_search_with_the_best_so_far(
    trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*arguments: Any) -> Interrupted:
        return Interrupted(trials)

    monkeypatch.setattr(tune, "_trials", made)
    path = tmp_path / "tuned.toml"
    assert main([*WORDS, "--json", "--out", str(path)]) == 130
    told = json.loads(capsys.readouterr().out)
    assert len(told["trials"]) == trials
    assert (told["best"] is not None) is path.exists() is (trials > 0)
    if trials:
        batch = WorkerSettings.load({"config_file": path}).batch
        best = told["best"]["settings"]
        assert batch.max_num_seqs == best["max_num_seqs"]
        assert batch.max_num_batched_tokens == best["max_num_batched_tokens"]


def test_settings_that_cannot_be_written_are_not_searched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*WORDS, "--out", str(tmp_path / "file" / "tuned.toml")]) == 2
    assert f"{tmp_path}/file" in capsys.readouterr().err
