"""`python -m octavo_lab.hardening`: try bodies, and print what each did."""

from __future__ import annotations

import argparse

from octavo.stack import Stack, StackConfig

from octavo_lab.hardening.siege import GRPC_BYTES, HTTP_BYTES, Siege


def main() -> None:
    """Run a siege."""
    parser = argparse.ArgumentParser(prog="octavo_lab.hardening", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell-style pattern on `DOOR BODY`")
    parser.add_argument("--grpc-bytes", type=int, default=GRPC_BYTES)
    parser.add_argument("--http-bytes", type=int, default=HTTP_BYTES)
    parser.add_argument("--door", action="append", choices=("grpc", "http"))
    parsed = parser.parse_args()
    # Faster than any device, so that a wait is the service's and not a long prompt's.
    sim = ("--runner", "sim", "--sim-speed", "10")
    with Stack(StackConfig(model="sim", worker_args=sim, gateway_port=0)) as stack:
        stack.wait_ready()
        siege = Siege(
            stack,
            grpc_bytes=parsed.grpc_bytes,
            http_bytes=parsed.http_bytes,
            only=parsed.only,
            on_effect=lambda one: print(one, flush=True),
        )
        siege.run(tuple(parsed.door or ("grpc", "http")))
        print(f"calm {siege.calm_s * 1000:.0f} ms, streams harmed {siege.harmed}")


if __name__ == "__main__":
    main()
