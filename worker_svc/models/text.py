"""What a model's files say of text, and how a Hugging Face folder says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from octavo.sampling import SamplingParams

from worker_svc.errors import ModelLoadError
from worker_svc.models.files import read_json
from worker_svc.models.generation import GENERATION_CONFIG, config_defaults

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class ModelText:
    """Everything about text: none of it touches the weights."""

    tokenizer_files: dict[str, bytes]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos_token: bool
    chat_template: str | None
    special_tokens: dict[str, str]
    generation_defaults: SamplingParams = field(default_factory=SamplingParams)


def folder_text(folder: Path) -> ModelText:
    """Return tokenizer, end tokens, chat template and generation defaults of a model folder.

    Raises:
        ModelLoadError: there is no tokenizer.json, or a file is damaged.
    """
    config = read_json(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelLoadError(f"{tokenizer}: no such file; the model needs a fast tokenizer")
    files = {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}
    settings = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / GENERATION_CONFIG)
    vocabulary = _special_ids(read_json(tokenizer))
    special = {
        role: text for role in _SPECIAL_TOKENS if (text := _token_text(settings.get(role))) is not None
    }
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    end_of_turn = vocabulary.get(special.get("eos_token", ""))
    bos = (*_ids(config.get("bos_token_id")), *_ids(generation.get("bos_token_id")))
    named_bos = vocabulary.get(special.get("bos_token", ""))
    return ModelText(
        tokenizer_files=files,
        eos_token_ids=tuple(dict.fromkeys((*eos, *(() if end_of_turn is None else (end_of_turn,))))),
        bos_token_id=named_bos if named_bos is not None else next(iter(bos), None),
        add_bos_token=bool(settings.get("add_bos_token", False)),
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        generation_defaults=config_defaults(generation, str(folder / GENERATION_CONFIG)),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    added = tokenizer.get("added_tokens") or []
    return {str(token["content"]): int(token["id"]) for token in added}


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> tuple[int, ...]:
    """Return the ids of a field that holds nothing, one id or a list of ids."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default template, from its own file or from tokenizer_config.json."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
