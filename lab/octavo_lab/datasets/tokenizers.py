"""Ways to split text into the tokens of the model under test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from octavo import AsyncClient
from octavo.errors import OctavoError

from octavo_lab.command import BenchError

_AT_ONCE: Final = 16


class Tokenizer(Protocol):
    """Splits text."""

    async def pieces(self, text: str) -> list[str]:
        """Return the text of each token, without special tokens.

        Pieces may lack leading blanks, as some tokenizers drop those of single tokens.

        Raises:
            BenchError: the text cannot be split; the message says what to do.
        """


async def counts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def count(text: str) -> int:
        async with room:
            return len(await tokenizer.pieces(text))

    return await asyncio.gather(*map(count, texts))


@dataclass(frozen=True, slots=True)
class ServiceTokenizer:
    """The tokenizer of an Octavo service, through its `Tokenize` call."""

    client: AsyncClient
    model: str

    async def pieces(self, text: str) -> list[str]:
        """Split; see `Tokenizer`."""
        try:
            answer = await self.client.tokenize(text, model=self.model, add_special_tokens=False, pieces=True)
        except OctavoError as error:
            raise BenchError(f"the service cannot tokenize: {error}; name a file with --tokenizer") from error
        return list(answer.pieces)


class FileTokenizer:
    """A tokenizer.json of this machine, alone or in a folder, or that of the demo model (`demo`).

    Raises:
        BenchError: there is none.
    """

    def __init__(self, name: str) -> None:
        from tokenizers import Tokenizer as Fast  # noqa: PLC0415 # of the extra `scheduler`

        path = Path(name).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = _demo_tokenizer() if name == "demo" else path.read_bytes()
        except OSError as error:
            raise BenchError(f"{path}: {error.strerror}") from error
        try:
            self._tokenizer: Any = Fast.from_buffer(content)
        except Exception as error:  # it raises nothing more specific
            raise BenchError(f"not a tokenizer.json: {error}") from error

    async def pieces(self, text: str) -> list[str]:
        """Split; see `Tokenizer`."""
        encoded = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=False)
        return [text[start:end] for start, end in encoded.offsets]


def _demo_tokenizer() -> bytes:
    # Not earlier: they need the extra `worker`.
    from worker_svc.models.resolve import resolve  # noqa: PLC0415
    from worker_svc.runner.torch.gguf_file import open_gguf  # noqa: PLC0415

    model = resolve("demo", lambda what, fraction: None)
    return open_gguf(model.path).text.tokenizer_files["tokenizer.json"]
