"""Ways to split text into the tokens of the model under test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from octavo import AsyncClient
from octavo.errors import OctavoError

from octavo_lab.command import BenchError

DEMO: Final = "demo"
_AT_ONCE: Final = 16
_TIMEOUT_S: Final = 30.0


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


class ServiceTokenizer:
    """The tokenizer of an Octavo service, through its `Tokenize` call."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def pieces(self, text: str) -> list[str]:
        """Split; see `Tokenizer`."""
        try:
            answer = await self._client.tokenize(
                text, model=self._model, add_special_tokens=False, pieces=True
            )
        except OctavoError as error:
            raise BenchError(f"the service cannot tokenize: {error}; name a file with --tokenizer") from error
        return list(answer.pieces)


class FileTokenizer:
    """A tokenizer.json of this machine, or the demo model's."""

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer as Fast  # noqa: PLC0415 # of the extra `scheduler`

        try:
            self._tokenizer: Any = Fast.from_buffer(content)
        except Exception as error:  # it raises nothing more specific
            raise BenchError(f"not a tokenizer.json: {error}") from error

    @classmethod
    def named(cls, name: str) -> FileTokenizer:
        """Open `demo`, a tokenizer.json, or a folder that has one.

        Raises:
            BenchError: there is none.
        """
        if name == DEMO:
            return cls(_demo_tokenizer())
        path = Path(name).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(path.read_bytes())
        except OSError as error:
            raise BenchError(f"{path}: {error.strerror}") from error

    async def pieces(self, text: str) -> list[str]:
        """Split; see `Tokenizer`."""
        encoded = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=False)
        return [text[start:end] for start, end in encoded.offsets]


def _demo_tokenizer() -> bytes:
    # Not earlier: they need the extra `worker`.
    from worker_svc.models.resolve import resolve  # noqa: PLC0415
    from worker_svc.runner.torch.gguf_file import open_gguf  # noqa: PLC0415

    model = resolve(DEMO, lambda what, fraction: None)
    return open_gguf(model.path).text.tokenizer_files["tokenizer.json"]


class HttpTokenizer:
    """The tokenizer of a server that has /tokenize, as `vllm serve` and Octavo's gateway do."""

    def __init__(self, base_url: str, model: str, api_key: str = "") -> None:
        self._url = f"{base_url.rstrip('/').removesuffix('/v1')}/tokenize"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def pieces(self, text: str) -> list[str]:
        """Split; see `Tokenizer`."""
        import aiohttp  # noqa: PLC0415 # of the extra `bench`

        body = {"model": self._model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.post(self._url, json=body) as answer,
            ):
                answer.raise_for_status()
                strings = (await answer.json(content_type=None))["token_strs"]
                return [_plain(string) for string in strings]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise BenchError(
                f"{self._url} does not say how text is split ({error or 'no answer'}): "
                "name the model's tokenizer.json with --tokenizer"
            ) from error


def _byte_of() -> dict[str, int]:
    """Return the byte for each character with which byte-level BPE writes bytes down, as GPT-2 set out."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF: Final = _byte_of()
_BLANK_OF_PIECES: Final = "\u2581"
"""How SentencePiece writes a blank."""


def _plain(string: str) -> str:
    """Return the text of a token that is written down as the vocabulary has it."""
    if _BLANK_OF_PIECES in string:
        return string.replace(_BLANK_OF_PIECES, " ")
    if all(char in _BYTE_OF for char in string):
        return bytes(_BYTE_OF[char] for char in string).decode(errors="replace")
    return string
