"""Hostile constraints against processes of their own, beside a stream that must not notice."""

# ruff: noqa: E501 - lists of texts

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any, Final, Self

import psutil
from octavo.aio import AsyncClient
from octavo.errors import InvalidRequestError
from octavo.sampling import StructuredOutput
from octavo.stack import Stack, StackConfig

from tests.fuzz.mutations import harmed
from tests.fuzz.reader import Fault, Reader

_TOGETHER: Final = 20
_READY_S: Final = 300.0
_STALL_S: Final = 8.0
"""Between two tokens of a stream beside them: more than a busy machine makes of a step."""
_GROWTH_BYTES: Final = 768 << 20
_WIDE: Final = "".join(chr(code) for code in range(0x4E00, 0x6E00, 2))
_REGEXES: Final = (
    "(a|a)*b", "(x+x+)+y", "(.*a){40}", "((a{1,99}){1,99}){1,99}", "[a-z]{100000}", "(", "[", "a{3,1}", "(?=a)b",
    r"(a)\1", r"\p{L}+\p{Nope}", "[\\x00-\\u2e7f]+", "^(|.*)$", "(" * 300 + ")" * 300, "|".join("ab" * 50), r"\b", "$^",
    f"[{_WIDE}]{{1,200}}", "(?i)ß{1,50}", ".{0,5000}x.{0,5000}", r"\Q", "a**", "(?P<n>a)(?P<n>b)", "\ud7ff", "(?s).*",
)  # fmt: skip
_GRAMMARS: Final = (
    'root ::= root root | "a" | ""', 'root ::= root "a" | "b"', "root ::= nowhere", "root ::= root", "x", "root ::=",
    'root ::= a\na ::= b\nb ::= a', "root ::= " + "(" * 900 + '"a"' + ")" * 900, f"root ::= [{_WIDE}]{{1,200}}",
    "root ::= " + "(" * 60_000, 'root ::= (("a"{0,900}){0,900}){0,900}', 'root ::= "' + "é" * 5000 + '"', "root ::= [",
    "root ::= " + " | ".join(f'"{one}" root' for one in range(3000)), 'root ::= "a"{999999}', "root ::= [^\\u0000]*",
    "root ::= [z-a]", 'root ::= "\\x"', "\0", "root ::= #",
)  # fmt: skip
_TAGS: Final = (
    "{}", '{"structures": []}', '{"structures": [{"begin": 1}], "triggers": ["a"]}', '{"format": {"type": "x"}}',
    '{"type": "structural_tag", "format": {"type": "sequence", "elements": []}}',
    '{"structures": [{"begin": "<a>", "schema": {"$ref": "#"}, "end": "</a>"}], "triggers": ["<a>"]}',
    '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "integer"}}}',
)  # fmt: skip
_LEAVES: Final[tuple[Callable[[random.Random], Any], ...]] = (
    lambda rng: {"$ref": rng.choice(("#", "#/$defs/a", "#/$defs/b", "#/nowhere", "https://a.test/b", "%", 7))},
    lambda rng: {"enum": [f"{rng.random()}" for _ in range(rng.choice((0, 1, 40, 3000)))]},
    lambda rng: {"type": "string", "pattern": rng.choice(_REGEXES)},
    lambda rng: {"type": "string", "minLength": 10 ** rng.randrange(9), "maxLength": 10 ** rng.randrange(9)},
    lambda rng: {"type": "integer", "multipleOf": rng.choice((0, -1, 7, 1e-9, 999983)), "minimum": -(10 ** rng.randrange(60))},
    lambda rng: {"type": "array", "minItems": 10 ** rng.randrange(8), "uniqueItems": True},
    lambda rng: {"type": rng.choice(("string", "strange", ["null", "null"], None, 7)), "format": rng.choice(("uri", "x", 3))},
    lambda rng: {"const": rng.choice((1e308, "\0", {"a": [[]]}, -0.0, "\ud7ff"))},
    lambda rng: rng.choice((True, False, {}, [], 0)),
)  # fmt: skip


def schema(rng: random.Random, depth: int = 4) -> Any:
    """Return something like a schema."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(_LEAVES)(rng)
    parts = [schema(rng, depth - 1) for _ in range(rng.choice((1, 2, 3, 12)) if depth < 3 else 2)]
    names = [rng.choice(("a", "é" * 300, "", "\n", '"', "\ud7ff", f"{rng.random()}")) for _ in parts]
    wanted: dict[str, Any] = {
        rng.choice(("allOf", "anyOf", "oneOf", "prefixItems")): parts,
        rng.choice(("items", "additionalProperties", "not", "if", "contains")): parts[0],
        rng.choice(("properties", "patternProperties", "$defs", "dependentSchemas")): dict(
            zip(names, parts, strict=True)
        ),
        "required": names,
        "$defs": {"a": parts[-1], "b": {"$ref": "#/$defs/a"}},
    }
    return {name: wanted[name] for name in wanted if rng.random() < 0.6}


def constraint(rng: random.Random) -> StructuredOutput:
    """Return a constraint that nobody should send."""
    kind = rng.choice(
        ("json_schema", "json_schema", "regex", "grammar", "structural_tag", "choice", "nested")
    )
    if kind == "choice":
        texts = ("", "\n", '"', "\\", "a" * 9000, "🙂", *map(str, range(rng.choice((1, 2000)))))
        return StructuredOutput(choice=tuple(rng.choices(texts, k=rng.choice((0, 1, 3, 500)))))
    if kind == "nested":
        depth, opened = (
            rng.choice((3, 90, 101, 9000)),
            rng.choice(('{"items":', '{"not":', '{"anyOf":[', '{"$defs":{"a":')),
        )
        closing = opened[::-1].translate(str.maketrans("{[", "}]", '":abcdefghijklmnopqrstuvwxyzO$'))
        return StructuredOutput(
            json_schema=opened * depth + "{}" + closing * depth, strict=rng.random() < 0.5
        )
    texts = {"regex": _REGEXES, "grammar": _GRAMMARS, "structural_tag": _TAGS}
    text = json.dumps(schema(rng)) if kind == "json_schema" else rng.choice(texts[kind])
    if rng.random() < 0.5:
        text = harmed(rng, text.encode(), (text.encode(),), message=False).decode(errors="replace")
    more: dict[str, Any] = {kind: text[:200_000], "compact": rng.random() < 0.5, "strict": rng.random() < 0.3}
    return StructuredOutput(**more)


class GrammarReader(Reader):
    """A scheduler and a simulated worker, as processes."""

    name = "grammars"

    def __enter__(self) -> Self:
        self._stack = Stack(
            StackConfig(
                model="sim", worker_args=("--runner", "sim"), scheduler_args=("--no-overload-control",)
            )
        )
        self._stack.start()
        self._stack.wait_ready(_READY_S)
        self._runner = asyncio.Runner()
        self._client = AsyncClient(self._stack.endpoint)
        self._runner.run(self._ask(StructuredOutput(grammar='root ::= "a"')))
        self._resident = self._memory()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()
        self._stack.stop()

    def episode(self, rng: random.Random) -> None:
        constraints = [constraint(rng) for _ in range(_TOGETHER)]
        self.read.extend(repr(one).encode() for one in constraints)
        self._runner.run(self._together(constraints))
        self._stack.check()
        if (grown := self._memory() - self._resident) > _GROWTH_BYTES:
            raise Fault(f"the worker grew by {grown >> 20} MiB")

    def finish(self) -> None:
        self._runner.run(self._audit())

    async def _together(self, constraints: list[StructuredOutput]) -> None:
        asked = asyncio.gather(*map(self._ask, constraints))
        last = time.monotonic()
        async for _ in self._client.stream("a neighbour", max_tokens=100, ignore_eos=True):
            gap, last = time.monotonic() - last, time.monotonic()
            if gap > _STALL_S:
                raise Fault(f"a stream beside them stood still for {gap:.1f} s")
        await asked

    async def _ask(self, structured: StructuredOutput) -> None:
        try:
            await self._client.generate("x", structured=structured, max_tokens=12)
        except InvalidRequestError as error:
            if not str(error):
                raise Fault("an error that says nothing") from None

    async def _audit(self) -> None:
        status = await self._client.status()
        if status.live_requests or any(worker.pool.active for worker in status.workers):
            raise Fault(f"something is left: {status}")
        if "INTERNAL" in status.outcomes:
            raise Fault(f"{status.outcomes}")

    def _memory(self) -> int:
        return sum(psutil.Process(one.process.pid).memory_info().rss for one in self._stack.workers)
