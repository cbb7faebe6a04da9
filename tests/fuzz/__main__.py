"""`make fuzz`: fuzz every reader for its share of the time; keep what finds a fault in build/fuzz/."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import structlog

from tests.fuzz.reader import fuzz
from tests.fuzz.readers import readers


def main() -> int:
    """Return 1 when a fault was found."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="for all readers together; 10 without --messages")
    parser.add_argument("--messages", type=int, default=sys.maxsize, help="so many for each, at most")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell-style pattern on the name")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="default: a new one")
    parsed = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    chosen = [one for name, one in readers().items() if fnmatchcase(name, parsed.only)]
    minutes = parsed.minutes or (10.0 if parsed.messages == sys.maxsize else float("inf"))
    share_s = minutes * 60 / max(1, len(chosen))

    def is_over(messages: int, seconds: float) -> bool:
        return messages >= parsed.messages or seconds > share_s

    print(f"seed {parsed.seed}")
    failed = False
    for reader in chosen:
        with reader:
            outcome = fuzz(reader, parsed.seed, is_over, Path("build/fuzz"))
        rate = outcome.messages / outcome.seconds
        print(f"{outcome.name:20} {outcome.messages:9} messages {rate:7.0f}/s", flush=True)
        for path in outcome.faults:
            failed = True
            print(f"    {path}: {path.read_text().strip().splitlines()[-1]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
