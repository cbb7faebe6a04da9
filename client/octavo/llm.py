"""`octavo.LLM`: a whole stack inside a script or a notebook, for lists of prompts."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from octavo.batch_file import BatchLine, throughput_order
from octavo.client import Client
from octavo.errors import InvalidRequestError, OctavoError
from octavo.sampling import SamplingParams
from octavo.stack import Stack, StackConfig
from octavo.types import BatchItem, ChatMessage, GenerateResult, Prompt

Conversation = str | Sequence[ChatMessage | Mapping[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None
_NO_SHEDDING: Final = ("--no-overload-control",)
"""Whoever brings all of the load at once does not want it shed."""


class LLM:
    """A model for scripts: starts a scheduler and workers of its own, and ends with them.

        with octavo.LLM("demo", max_num_seqs=64) as llm:
            for result in llm.generate(["One", "Two"], octavo.SamplingParams(max_tokens=16)):
                print(result.text)

    Without `with`, it ends by `close()` or with the process. It needs the extras `scheduler` and `worker`.

    Args:
        model: as of `octavo worker --model`: a folder, a GGUF file, a name on the hub, or `demo`.
        num_workers: workers to run.
        progress: draw a progress bar.
        ready_timeout: seconds until the model serves.
        scheduler: settings of the scheduler, by the names of its flags: `{"policy": "fcfs"}`.
        **settings: settings of each worker, by the names of its flags: `dtype="float32"`.

    Raises:
        StackError: it cannot start; the message is the failing process's own.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        num_workers: int = 1,
        progress: bool = True,
        ready_timeout: float = 1800.0,
        scheduler: Mapping[str, object] | None = None,
        **settings: object,
    ) -> None:
        self._progress = progress
        self._stack = Stack(
            StackConfig(
                model=model,
                num_workers=num_workers,
                scheduler_args=[*_NO_SHEDDING, *_flags(scheduler or {})],
                worker_args=_flags(settings),
            )
        )
        self._client: Client | None = None
        atexit.register(self.close)
        try:
            self._stack.start()
            with _Bar(shown=progress) as bar:
                self._stack.wait_ready(ready_timeout, bar.share)
            self._client = Client(self._stack.endpoint)
        except BaseException:
            self._end(keep_logs=True)
            raise

    @property
    def client(self) -> Client:
        """The client of the stack, for everything that is not a list of prompts.

        Raises:
            RuntimeError: it is closed.
        """
        if self._client is None:
            raise RuntimeError("this LLM is closed")
        return self._client

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None, **options: Any
    ) -> list[GenerateResult]:
        """Return the output for each prompt, in order; they run in the order that is done soonest.

        Args:
            prompts: text or token ids, or a sequence of such.
            sampling_params: for all, or one for each; what is unset takes the model's own defaults.
            **options: further options of every request; see `octavo.types.GenerateOptions`.

        Raises:
            OctavoError: a request failed; a note of the error says which. `client.batch` gives the outcome
                of each instead.
        """
        many: Sequence[Prompt] = [prompts] if _is_prompt(prompts) else prompts  # type: ignore[assignment,list-item]
        return self._run(many, sampling_params, options)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
        **options: Any,
    ) -> list[GenerateResult]:
        """Return the answer in each conversation, in order; arguments and errors are those of `generate`.

        A conversation is a list of turns, or text, which is one turn of the user.
        """
        one = isinstance(conversations, str) or _is_turn(next(iter(conversations), None))
        many: Sequence[Conversation] = [conversations] if one else conversations  # type: ignore[assignment,list-item]
        turns = [[ChatMessage("user", given)] if isinstance(given, str) else given for given in many]
        return self._run(turns, sampling_params, options)

    def close(self) -> None:
        """End the stack, and remove its logs; does nothing the second time."""
        self._end(keep_logs=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, inputs: Sequence[Any], sampling_params: Sampling, options: dict[str, Any]
    ) -> list[GenerateResult]:
        given = _for_each(sampling_params, len(inputs))
        lines = [
            BatchLine(index, str(index), "", BatchItem(one, _item_options(sampling)), None)
            for index, (one, sampling) in enumerate(zip(inputs, given, strict=True))
        ]
        ordered = throughput_order(lines)
        results: dict[int, GenerateResult] = {}
        with _Bar(shown=self._progress) as bar:
            items = [line.item for line in ordered if line.item is not None]
            for place, outcome in self.client.batch_iter(items, **options):
                index = ordered[place].number
                if isinstance(outcome, OctavoError):
                    outcome.add_note(f"of prompt {index}")
                    raise outcome
                results[index] = outcome
                bar.count(len(results), len(inputs))
        return [results[index] for index in range(len(inputs))]

    def _end(self, *, keep_logs: bool) -> None:
        atexit.unregister(self.close)
        if self._client is not None:
            self._client.close()
            self._client = None
        self._stack.stop()
        if not keep_logs:
            shutil.rmtree(self._stack.folder, ignore_errors=True)


class _Bar:
    """A progress bar, in a terminal and in a notebook alike; none where it is not to be shown."""

    def __init__(self, *, shown: bool) -> None:
        from rich.progress import Progress  # noqa: PLC0415 # of the extra `worker`

        self._progress = Progress(disable=not shown, transient=True)
        self._task = self._progress.add_task("", total=None)

    def share(self, what: str, share: float) -> None:
        """Show what is being done, and how far it is (0 to 1)."""
        self._progress.update(self._task, description=what, completed=share, total=1.0)

    def count(self, done: int, of: int) -> None:
        """Show how many are done."""
        self._progress.update(self._task, description=f"{done} of {of}", completed=done, total=of)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _flags(settings: Mapping[str, object]) -> list[str]:
    """Return settings as arguments of a command: False is `--no-x`, True is `--x`, a list has commas."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            flags.append(f"--{flag}={','.join(map(str, value))}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def _is_prompt(given: object) -> bool:
    if isinstance(given, str):
        return True
    return isinstance(given, Sequence) and bool(given) and all(isinstance(part, int) for part in given)


def _is_turn(given: object) -> bool:
    return isinstance(given, ChatMessage | Mapping)


def _item_options(sampling: SamplingParams | None) -> dict[str, Any]:
    return {} if sampling is None else {"sampling": sampling}


def _for_each(given: Sampling, count: int) -> list[SamplingParams | None]:
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        problem = f"must be one, or one for each of the {count} prompts, got {len(given)}"
        raise InvalidRequestError.of_fields(("sampling_params", problem))
    return list(given)
