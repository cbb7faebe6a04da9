"""Pack public traces into octavo-lab: `python scripts/make_traces.py FOLDER` with the publishers' files.

lab/octavo_lab/traces/README.md says where they come from, and `TRACES` what they are called in the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo_lab import traces

PACKAGE = Path(traces.__file__).parent


def main(folder: Path) -> None:
    """Write the packed traces into the package."""
    for name in traces.TRACES:
        requests = traces.read_trace(name, folder)
        content = traces.packed(requests)
        if traces.unpacked(content) != requests:
            sys.exit(f"{name} is not what it was when it is unpacked")
        path = PACKAGE / f"{name}.json.xz"
        path.write_bytes(content)
        print(f"{path}: {len(requests)} requests, {len(content)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
