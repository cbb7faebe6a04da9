"""`octavo bench serve`: planned traffic against a service."""

from typing import Final

DEFAULT_REQUESTS: Final = 200
"""Of a run that is not told how many, nor for how long."""
