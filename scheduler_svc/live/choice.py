"""One choice of a live request: how its tokens become text, and what of it its client has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.protocol.steps import FinishReason
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.text.detokenizer import TextStream
from scheduler_svc.text.stop_strings import StopMatcher


@dataclass(slots=True, eq=False)
class Choice:
    """Text of one choice, as far as it has come."""

    index: int
    text: TextStream | None
    """None when nobody needs text."""
    stops: StopMatcher | None
    min_tokens: int
    num_tokens: int = 0
    """Output tokens that count: none past a stop string."""
    over: FinishReason | None = None
    """It is over for a reason that the core does not know: a stop string, or a resumed choice that
    had been complete. What the core still says of it is not shown."""
    ended: bool = False
    """The client has been told the end."""
    last_token_at: float | None = None
    delta: pb.Delta | None = None
    """The event that waits in the outbox, while `batch` is the outbox's."""
    batch: int = -1

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self.stops.stopped_by if self.stops is not None else None

    def feed(self, token_ids: Sequence[int], *, hide_last: bool = False) -> tuple[str, int]:
        """Return the text to show and how many of the tokens count.

        `hide_last`: the last token is the one that stopped the choice; it counts but is no text.
        """
        shown = token_ids[:-1] if hide_last else token_ids
        if self.text is None:
            text = ""
        elif self.stops is None:
            text = self.text.feed(shown)
        else:
            text, used = self._feed_until_stop(self.text, self.stops, shown)
            if self.over is not None:
                return text, used
        self.num_tokens += len(token_ids)
        return text, len(token_ids)

    def flush(self) -> str:
        """Return the text that is left at the end."""
        if self.text is None or self.over is not None:
            return ""
        text = self.text.flush()
        if self.stops is None:
            return text
        text = self.stops.feed(text)
        if self.stops.stopped_by is not None:
            self.over = FinishReason.STOP
            return text
        return text + self.stops.flush()

    def _feed_until_stop(
        self, stream: TextStream, stops: StopMatcher, token_ids: Sequence[int]
    ) -> tuple[str, int]:
        parts = []
        for used, token_id in enumerate(token_ids, start=1):
            text = stream.feed((token_id,))
            # As stop tokens, stop strings do not count before `min_tokens`.
            parts.append(stops.feed(text) if self.num_tokens + used > self.min_tokens else text)
            if stops.stopped_by is not None:
                self.over = FinishReason.STOP
                self.num_tokens += used
                return "".join(parts), used
        return "".join(parts), len(token_ids)
