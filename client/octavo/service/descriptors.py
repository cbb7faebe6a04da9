"""Open files and connections of a process: as many as the system allows."""

from __future__ import annotations

import sys

import structlog

_log = structlog.get_logger()


def raise_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one, and say so.

    Soft limits are low for programs that use select(), which none of the services does: 1,024 would be
    1,000 clients.
    """
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        # macOS says "unlimited" and means less.
        _log.warning("descriptor_limit_kept", limit=soft, hard_limit=hard, problem=str(error))
        return
    _log.info("descriptor_limit_raised", limit=hard, former_limit=soft)


def descriptor_limit() -> int | None:
    """Return how many descriptors this process may have open, None without a limit."""
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
