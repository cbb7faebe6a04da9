"""`python -m worker_svc`: the same as `octavo worker`."""

from __future__ import annotations

import sys

from worker_svc.config import WorkerSettings
from worker_svc.main import run

if __name__ == "__main__":
    sys.exit(run(WorkerSettings.load({})))
