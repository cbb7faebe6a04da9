"""`python -m scheduler_svc` is `octavo scheduler`."""

from __future__ import annotations

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["scheduler", *sys.argv[1:]]))
