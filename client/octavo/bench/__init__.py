"""Benchmarks that users can run: `octavo bench NAME`."""


class BenchInterrupted(Exception):
    """A benchmark was interrupted; `partial` is the text of what there is."""

    def __init__(self, partial: str) -> None:
        super().__init__(partial)
        self.partial = partial


class BenchError(Exception):
    """A benchmark cannot be run as asked; the message is one line."""
