"""Benchmarks that users can run: `octavo bench NAME`."""


class BenchError(Exception):
    """A benchmark cannot be run as asked; the message is one line."""
