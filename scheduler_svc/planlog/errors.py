"""Errors of the plan log."""


class PlanLogError(Exception):
    """A plan log cannot be written, or is none, or is of another version; the message is one line."""
