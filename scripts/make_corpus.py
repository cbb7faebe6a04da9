#!/usr/bin/env python3
"""Make the corpus from which benchmarks cut their prompts: text that the demo model wrote.

    scripts/make_corpus.py [FILE]

Starts a stack with the demo model, asks it for stories, explanations, letters and dialogues about many
things (seeded, temperature 0.8), and keeps what is plain ASCII prose: no answer that repeats itself,
nothing after the last full sentence. The same version of Octavo on the same kind of machine writes the
same text again; elsewhere a rounding may change a word, and with it what follows.
"""

from __future__ import annotations

import asyncio
import lzma
import re
import sys
import zlib
from pathlib import Path

from octavo import AsyncClient, GenerateResult, OctavoError
from octavo.stack import Stack, StackConfig

TARGET = Path(__file__).parents[1] / "lab" / "octavo_lab" / "datasets" / "corpus.txt.xz"
FORMS = (
    "Write a short story about {}.",
    "Explain to a curious child how one should think about {}.",
    "Write a letter to a friend about {}.",
    "Write an encyclopedia article about {}.",
    "Write a dialogue between two people who disagree about {}.",
    "Give a long list of practical advice about {}, with reasons.",
)
THINGS = (
    *("a lighthouse", "the invention of the printing press", "bread", "a long journey by train", "the moon"),
    *("gardens in winter", "an old violin", "the rules of chess", "bees", "a city built on water", "paper"),
    *("how rivers shape the land", "a lost letter", "the work of a carpenter", "volcanoes", "silence"),
    *("learning a second language", "a market in the morning", "clocks", "whales", "the history of maps"),
    *("a storm at sea", "cooking for many guests", "bridges", "an honest mistake", "dreams", "glass"),
    *("the first day of school", "migrating birds", "a mountain village", "libraries", "salt", "kites"),
)
MAX_TOKENS = 420
MIN_CHARS = 400
MOST_REPETITIVE = 0.36
"""Share of its size to which deflate shrinks a text that repeats itself."""
PLAIN = re.compile(r"[\n -~]*")


def main() -> None:
    """Write the file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    worker_args = ("--max-num-seqs", "32", "--max-num-batched-tokens", "512")
    # Nothing times out: the whole book is ordered at once.
    with Stack(StackConfig(worker_args=worker_args)) as stack:
        stack.wait_ready()
        answers = asyncio.run(write(stack.endpoint))
    texts = [
        kept for answer in answers if not isinstance(answer, OctavoError) and (kept := clean(answer.text))
    ]
    text = "\n\n".join(texts) + "\n"
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(
        f"{path}: {len(texts)} of {len(answers)} answers, {len(text)} characters, {path.stat().st_size} bytes"
    )


async def write(endpoint: str) -> list[GenerateResult | OctavoError]:
    """Return the answers, in the order of the questions."""
    questions = [form.format(thing) for thing in THINGS for form in FORMS]
    async with AsyncClient(endpoint) as client:
        room = asyncio.Semaphore(64)

        async def ask(number: int, question: str) -> GenerateResult | OctavoError:
            async with room:
                try:
                    return await client.chat(
                        question,
                        max_tokens=MAX_TOKENS,
                        temperature=0.8,
                        top_p=0.95,
                        repetition_penalty=1.05,
                        seed=number,
                        priority="batch",
                    )
                except OctavoError as error:
                    print(f"{question}: {error}", file=sys.stderr)
                    return error

        return await asyncio.gather(*(ask(number, one) for number, one in enumerate(questions)))


def clean(text: str) -> str:
    """Return the part of an answer that is worth keeping, or nothing."""
    text = re.sub(r"[ \t]+\n", "\n", text).replace("\u2019", "'").strip()
    end = max(text.rfind(mark) for mark in (".", "!", "?"))
    text = text[: end + 1]
    if len(text) < MIN_CHARS or not PLAIN.fullmatch(text):
        return ""
    repetitive = len(zlib.compress(text.encode(), 9)) / len(text) < MOST_REPETITIVE
    return "" if repetitive else text


if __name__ == "__main__":
    main()
