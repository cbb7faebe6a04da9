"""The arms of the ladder: what differs between them, and nothing else does.

All have the same model, memory, limits and traffic. The static arms come twice: as the source articles
describe static batching (prompts padded to the longest, finished rows computed until the batch ends), and
without that waste, so that the reader sees what each part costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    title: str
    static: bool = False
    buckets: bool = False
    wasteful: bool = False
    """Static: prompts padded, finished rows computed."""
    chunked: bool = False
    prefix: bool = False

    def worker_args(self) -> tuple[str, ...]:
        """Arguments of its worker, beyond those that all arms share."""
        if not self.static:
            return ("--kv-layout", "paged")
        return ("--kv-layout", "contiguous", *(("--padded",) if self.wasteful else ()))

    def scheduler_args(self, static: StaticSettings, bucket_bounds: tuple[int, ...]) -> tuple[str, ...]:
        """Arguments of its scheduler, beyond those that all arms share."""
        if not self.static:
            return (
                "--chunked-prefill" if self.chunked else "--no-chunked-prefill",
                "--prefix-caching" if self.prefix else "--no-prefix-caching",
            )
        return (
            "--batching=static",
            "--no-prefix-caching",
            f"--static-batch-size={static.batch_size}",
            f"--static-timeout-s={static.timeout_s:g}",
            "--static-hold-finished" if self.wasteful else "--no-static-hold-finished",
            *((f"--static-buckets={','.join(map(str, bucket_bounds))}",) if self.buckets else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSettings:
    """What a static arm is tuned by."""

    batch_size: int = 8
    timeout_s: float = 0.5


CONTROL: Final = "static"
"""What everything is compared with: static batching over contiguous memory, as the articles have it."""
SUBJECT: Final = "continuous-chunked"
"""What is compared with it: named before anything is measured, and without the help of a prefix cache."""

_ALL: Final = (
    Arm("static", "static, contiguous", static=True, wasteful=True),
    Arm("static-buckets", "static, contiguous, length buckets", static=True, wasteful=True, buckets=True),
    Arm("static-nowaste", "static, contiguous, no waste", static=True),
    Arm("static-buckets-nowaste", "static, contiguous, length buckets, no waste", static=True, buckets=True),
    Arm("continuous", "continuous, paged"),
    Arm("continuous-prefix", "continuous, paged, prefix cache", prefix=True),
    Arm("continuous-chunked", "continuous, paged, chunked prefill", chunked=True),
    Arm(
        "continuous-chunked-prefix",
        "continuous, paged, chunked prefill, prefix cache",
        chunked=True,
        prefix=True,
    ),
)
ARMS: Final = {arm.name: arm for arm in _ALL}
