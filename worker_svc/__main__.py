"""`python -m worker_svc` is `octavo worker`."""

from __future__ import annotations

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["worker", *sys.argv[1:]]))
