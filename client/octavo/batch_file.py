"""Files of requests and of their outcomes: one JSON object per line.

A request has `prompt` (text or token ids) or `messages`, and any option of `GenerateOptions` beside
it; or it is a line of the OpenAI batch format, with those in `body`. It may have an `id` (or
`custom_id`); its line number stands in for one. An outcome carries the id, and a digest of the
request's line and of the options for all lines, so that a run that was interrupted goes on where it was
and no line is done twice. docs/cli.md describes both files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from octavo.errors import InvalidRequestError, OctavoError
from octavo.protocol.steps import TokenLogprobs
from octavo.sampling import StructuredOutput
from octavo.structured import of_response_format
from octavo.types import BatchItem, Choice, GenerateResult

PREFIX_CHARS: Final = 256
"""Prompts that begin with the same so many characters are one group: they share cached blocks."""
_CHARS_PER_TOKEN: Final = 4
# Of the OpenAI batch format; they say what the presence of `prompt` or `messages` says already.
_ENVELOPE: Final = frozenset({"id", "custom_id", "method", "url", "body", "stream", "stream_options", "user"})
_LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON has not."""
_BEGIN: Final = '{"id": '
"""Of every line of outcomes."""
_RENAMED: Final = {"max_completion_tokens": "max_tokens"}


class BatchFileError(Exception):
    """A file cannot be used; the message names it and the line."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a file. A line that is no request has `error` in place of `item`."""

    number: int
    """1 is the first line."""
    request_id: str
    digest: str
    item: BatchItem | None
    error: InvalidRequestError | None

    @property
    def group(self) -> str:
        """What the prompt begins with."""
        return _text(self.item)[:PREFIX_CHARS] if self.item is not None else ""

    @property
    def size(self) -> int:
        """About how many tokens the request will take."""
        if self.item is None:
            return 0
        prompt = self.item.input
        tokens = len(_text(self.item)) // _CHARS_PER_TOKEN
        if not isinstance(prompt, str) and not self.item.is_chat:
            tokens = len(prompt)
        options = self.item.options
        limit = options.get("max_tokens") or getattr(options.get("sampling"), "max_tokens", None)
        return tokens + (limit if isinstance(limit, int) else 0)


def read_requests(path: Path, options: Mapping[str, Any]) -> list[BatchLine]:
    """Return the requests of a file, in its order; empty lines are passed over.

    Args:
        path: the file.
        options: those that all lines are run with; they are part of what is digested.

    Raises:
        BatchFileError: the file cannot be read, or two requests have the same id.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BatchFileError(f"{path}: {error}") from None
    given = json.dumps(options, sort_keys=True) if options else ""
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, text in enumerate(content.split("\n"), start=1):
        if not text.strip():
            continue
        line = _parse(number, text, given)
        if line.request_id in seen:
            first = seen[line.request_id]
            raise BatchFileError(f"{path}: lines {first} and {number} have the same id {line.request_id!r}")
        seen[line.request_id] = number
        lines.append(line)
    return lines


def throughput_order(lines: Iterable[BatchLine]) -> list[BatchLine]:
    """Return requests in the order in which they finish soonest as a whole.

    Those with a common prefix run one after the other, while it is cached. Groups, and requests in a
    group, come longest first, so that no long one is left to run alone at the end.
    """
    groups: dict[str, list[BatchLine]] = {}
    for line in lines:
        groups.setdefault(line.group, []).append(line)
    for members in groups.values():
        members.sort(key=lambda line: -line.size)
    ordered = sorted(groups.values(), key=lambda members: -members[0].size)
    return [line for members in ordered for line in members]


class OutcomeFile:
    """The outcomes so far. Each is on the disk's way when `add` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn_at: int | None = None
        """Where a last line begins that an earlier run did not write to its end."""
        self._finished = self._read()
        # Half a surrogate pair has no UTF-8, but a JSON escape.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def _read(self) -> dict[str, str]:
        """Return the digests of requests that have a result; take note of a last line that is torn."""
        finished: dict[str, str] = {}
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise BatchFileError(f"{self._path}: {error}") from None
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                outcome = json.loads(line)
                if "error" not in outcome:
                    finished[outcome["id"]] = outcome["digest"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise BatchFileError(f"{self._path}: line {number} is not an outcome of a batch") from None
        if whole < len(content):
            begin = _BEGIN.encode()[: len(content) - whole]
            if not content[whole:].startswith(begin):
                raise BatchFileError(f"{self._path}: its last line is not an outcome of a batch")
            self._torn_at = whole
        return finished

    def unfinished(self, lines: Iterable[BatchLine]) -> list[BatchLine]:
        """Return the requests that have no result yet.

        Raises:
            BatchFileError: a request has changed since its result was written.
        """
        rest = []
        for line in lines:
            digest = self._finished.get(line.request_id)
            if digest is None:
                rest.append(line)
            elif digest != line.digest:
                raise BatchFileError(
                    f"{self._path}: request {line.request_id!r} (line {line.number}) has changed since, "
                    "or the options of the command have; write to another file"
                )
        return rest

    def add(self, line: BatchLine, outcome: GenerateResult | OctavoError) -> None:
        """Write an outcome."""
        record: dict[str, Any] = {"id": line.request_id, "line": line.number, "digest": line.digest}
        if isinstance(outcome, OctavoError):
            record["error"] = {"reason": outcome.reason, "message": outcome.message}
        else:
            record["choices"] = [_choice(choice) for choice in outcome.choices]
            record["usage"] = {
                "prompt_tokens": outcome.usage.prompt_tokens,
                "completion_tokens": outcome.usage.completion_tokens,
                "cached_tokens": outcome.usage.cached_tokens,
            }
        if self._torn_at is not None:  # Not before: until an outcome is there, the file stays as it was.
            os.truncate(self._path, self._torn_at)
            self._torn_at = None
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _parse(number: int, text: str, given: str) -> BatchLine:
    digest = blake2b(text.strip().encode() + given.encode(), digest_size=8).hexdigest()
    request_id = str(number)
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")  # noqa: TRY004 - the same kind of fault as broken JSON
        given_ids = (fields.get(name) for name in ("id", "custom_id"))
        request_id = next((str(one) for one in given_ids if one is not None), request_id)
        item, error = _item(number, fields), None
    except InvalidRequestError as fault:
        item, error = None, fault
    except (ValueError, RecursionError) as fault:
        item, error = None, InvalidRequestError.of_fields((f"line {number}", f"not a JSON object: {fault}"))
    return BatchLine(number, request_id, digest, item, error)


def _item(number: int, fields: dict[str, Any]) -> BatchItem:
    body = fields.get("body", {})
    if not isinstance(body, dict):
        raise InvalidRequestError.of_fields((f"line {number}: body", "must be an object"))
    given = {**fields, **body}
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InvalidRequestError.of_fields((f"line {number}", "must have one of prompt and messages"))
    name, value = ("prompt", prompt) if messages is None else ("messages", messages)
    inner = dict if name == "messages" else int
    if not isinstance(value, list) and (name == "messages" or not isinstance(value, str)):
        raise InvalidRequestError.of_fields((f"line {number}: {name}", "is of the wrong type"))
    if isinstance(value, list) and not all(isinstance(part, inner) for part in value):
        raise InvalidRequestError.of_fields((f"line {number}: {name}", "has an element of the wrong type"))
    if name == "messages":
        value = [_turn(f"line {number}: messages[{index}]", turn) for index, turn in enumerate(value)]
    return BatchItem(value, _options(number, given))


def _turn(path: str, turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with its content as one text; parts are joined by line breaks, as in the gateway."""
    turn = {key: one for key, one in turn.items() if one is not None}
    content = turn.get("content", "" if turn.get("tool_calls") else None)
    if isinstance(content, list):
        texts: list[str] = [
            part["text"]
            for part in content
            if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(content):
            raise InvalidRequestError.of_fields((f"{path}.content", "may have parts of text only"))
        content = "\n".join(texts)
    return turn if content is None else {**turn, "content": content}


def _options(number: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a line under our names; what asks for nothing is left out."""
    options = {
        _RENAMED.get(key, key): one for key, one in given.items() if key not in _ENVELOPE and one is not None
    }
    if isinstance(bias := options.get("logit_bias"), dict):
        try:
            options["logit_bias"] = {int(token): value for token, value in bias.items()}
        except ValueError:
            problem = "must have token ids as its keys"
            raise InvalidRequestError.of_fields((f"line {number}: logit_bias", problem)) from None
    # In chats of the OpenAI API whether, with how many in `top_logprobs`; in ours how many.
    if isinstance(asked := options.get("logprobs"), bool):
        del options["logprobs"]
        best = options.pop("top_logprobs", 0)
        if asked:
            options["logprobs"] = best
    if "response_format" in options:
        structured = _structured(number, options.pop("response_format"))
        if structured is not None:
            options["structured"] = structured
    return options


def _structured(number: int, wanted: Any) -> StructuredOutput | None:
    try:
        return of_response_format(wanted)
    except ValueError as error:
        raise InvalidRequestError.of_fields((f"line {number}: response_format", str(error))) from None


def _choice(choice: Choice) -> dict[str, Any]:
    record = {
        "index": choice.index,
        "text": choice.text,
        "finish_reason": choice.finish_reason.name.lower() if choice.finish_reason else None,
    }
    return {**record, "logprobs": [_position(one) for one in choice.logprobs]} if choice.logprobs else record


def _position(one: TokenLogprobs) -> dict[str, Any]:
    texts = one.top_token_bytes or (b"",) * len(one.top_token_ids)  # A request without text has none.
    best = zip(one.top_token_ids, texts, one.top_logprobs, strict=True)
    return {
        **_token(one.token_id, one.token_bytes, one.logprob),
        "top_logprobs": [_token(*token) for token in best],
    }


def _token(token_id: int, text: bytes, logprob: float) -> dict[str, Any]:
    shown = text.decode(errors="replace")
    return {"token_id": token_id, "token": shown, "logprob": max(logprob, _LEAST_LOGPROB)}


def _text(item: BatchItem | None) -> str:
    """Return a prompt as text, to compare prompts by."""
    if item is None:
        return ""
    if isinstance(item.input, str):
        return item.input
    if item.is_chat:
        return "\n".join(json.dumps(turn, ensure_ascii=False, default=str) for turn in item.input)
    return " ".join(map(str, item.input))
