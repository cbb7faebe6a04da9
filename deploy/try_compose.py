"""Bring the compose stack up on a real Docker engine, disturb it under traffic, and fail if a request does.

    python deploy/try_compose.py [--runner sim] [--profile tls ...]

Builds the images, and for each profile: brings the stack up, sends traffic through the gateways' DNS name and
over gRPC, scales the workers 1 - 3 - 1, kills the process of a worker and of the preferred scheduler,
restarts a gateway, and ends everything. As root it installs and starts an engine where none answers; where no
registry of images can be reached it makes the base image by debootstrap.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
DEBIAN: Final = ("docker.io", "docker-compose", "iptables", "debootstrap")
RELEASE: Final = "bookworm"
PUBLIC_BASE: Final = "python:3.11-slim-bookworm"
PROJECT: Final = "octavo-try"
IMAGES: Final = ("scheduler", "gateway", "worker", "worker-demo")
LEFT_OUT: Final = ("proc/*", "sys/*", "dev/*", "var/cache/*", "var/lib/apt/lists/*")
NOT_RUN: Final = ("usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "usr/share/python-wheels/*")
"""Of the base that images are made of, as Debian's own slim images leave it out."""
STEADY_S: Final = 8.0
PATIENCE_S: Final = 300.0
"""A machine may be slow: how long a thing takes is told, not judged."""


def say(text: str) -> None:
    """Tell what is going on, with the time since the start."""
    print(f"{time.strftime('%H:%M:%S')} [{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)


_BEGAN: Final = time.monotonic()


def run(*command: str, check: bool = True, **options: Any) -> str:
    """Run a command and return what it prints."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    done = subprocess.run(command, text=True, check=False, cwd=ROOT, **options)
    if check and done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{(done.stderr or '')[-4000:]}")
    return done.stdout.strip()


def wait(what: str, holds: Callable[[], bool]) -> None:
    """Wait until `holds()`, and tell how long that took; ends the program when it takes too long."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(0.2)
    say(f"{what}: {time.monotonic() - began:.1f} s")


class Docker:
    """The command line of an engine that answers."""

    def __init__(self, program: str) -> None:
        self.program = program

    def __call__(self, *arguments: str, check: bool = True, **options: Any) -> str:
        """Run one command of it."""
        return run(self.program, *arguments, check=check, **options)

    @classmethod
    def find(cls) -> Docker | None:
        """Return one that builds with BuildKit, which since 23 takes a plugin that may be missing."""
        programs = [str(Path(folder) / "docker") for folder in os.get_exec_path()]
        for program in filter(shutil.which, dict.fromkeys(programs)):
            version = run(program, "version", "--format", "{{.Client.Version}}", check=False)
            has_plugin = run(program, "buildx", "version", check=False).startswith("github.com")
            if version and (int(version.split(".")[0]) < 23 or has_plugin):
                return cls(program)
        return None

    def answers(self) -> bool:
        """Return whether the engine does."""
        return bool(self("version", "--format", "{{.Server.Version}}", check=False))

    def compose(self) -> list[str]:
        """Return the command of compose, either generation."""
        if run(self.program, "compose", "version", check=False):
            return [self.program, "compose"]
        return ["docker-compose"]


@contextlib.contextmanager
def engine() -> Iterator[Docker]:
    """Find or install an engine, and end it if it was started here."""
    docker = Docker.find()
    if docker is None:
        if os.geteuid() != 0:
            raise SystemExit("no Docker engine, and only root can install one")
        say("installing a Docker engine")
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *DEBIAN)
        docker = Docker.find()
        assert docker is not None
    if docker.answers():
        yield docker
        return
    with tempfile.TemporaryDirectory(prefix="octavo-docker-", ignore_cleanup_errors=True) as folder:
        command = [
            "dockerd",
            f"--data-root={folder}/data",
            f"--exec-root={folder}/exec",
            f"--pidfile={folder}/pid",
        ]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait("the engine answers", docker.answers)
            yield docker
        finally:
            process.terminate()
            process.wait(60)


def make_base(docker: Docker) -> dict[str, str]:
    """Return the build arguments that name the base images."""
    if docker("pull", "-q", PUBLIC_BASE, check=False):
        return {}
    base, build = f"{PROJECT}-base", f"{PROJECT}-build-base"
    if docker("images", "-q", build):
        return {"BASE": base, "BUILD_BASE": build}
    say("no registry of images answers: making a base image by debootstrap")
    with tempfile.TemporaryDirectory(prefix="octavo-base-") as folder:
        root = Path(folder) / "root"
        packages = "--include=python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", packages, RELEASE, str(root))
        for mount in ("proc", "sys"):
            subprocess.run(["umount", "-l", str(root / mount)], check=False, capture_output=True)
        _import(docker, root, f"{PROJECT}-whole", LEFT_OUT)
        _import(docker, root, base, (*LEFT_OUT, *NOT_RUN))
        _build_base(docker, Path(folder) / "context", build)
    return {"BASE": base, "BUILD_BASE": build}


def _import(docker: Docker, root: Path, image: str, left_out: tuple[str, ...]) -> None:
    command = ["tar", "-C", str(root), *(f"--exclude=./{path}" for path in left_out), "-cf", "-", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
        docker("import", "-", image, stdin=tar.stdout)


def _build_base(docker: Docker, context: Path, image: str) -> None:
    """Builds reach packages as this machine does: by its authorities, pip settings and folders of wheels."""
    context.mkdir()
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", context / "ca.crt")
    settings = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt"]
    links = run(sys.executable, "-m", "pip", "config", "get", "global.find-links", check=False).split()
    for number, folder in enumerate(link for link in links if Path(link).is_dir()):
        shutil.copytree(folder, context / "links" / str(number))
    (context / "links").mkdir(exist_ok=True)
    settings += ["find-links =", *(f"    /opt/links/{path.name}" for path in (context / "links").iterdir())]
    if index := run(sys.executable, "-m", "pip", "config", "get", "global.index-url", check=False):
        settings.append(f"index-url = {index}")
    (context / "pip.conf").write_text("\n".join(settings) + "\n")
    (context / "Dockerfile").write_text(
        f"FROM {PROJECT}-whole\nCOPY ca.crt /etc/ssl/certs/ca-certificates.crt\n"
        "COPY pip.conf /etc/pip.conf\nCOPY links /opt/links\n"
    )
    docker("build", "-q", "-t", image, str(context), env={**os.environ, "DOCKER_BUILDKIT": "1"})


def build(docker: Docker, arguments: dict[str, str]) -> None:
    """Build the images, and tell their sizes and what their layers are."""
    revision = run("git", "rev-parse", "--short", "HEAD", check=False) or "unknown"
    for target in IMAGES:
        began = time.monotonic()
        given = [f"--build-arg={name}={value}" for name, value in {**arguments, "REVISION": revision}.items()]
        command = ["build", "-q", "--network=host", *given, f"--target={target}", f"-t=octavo/{target}", "."]
        docker(*command, env={**os.environ, "DOCKER_BUILDKIT": "1"})
        size = int(docker("image", "inspect", "-f", "{{.Size}}", f"octavo/{target}")) / 1e6
        say(f"image {target}: {size:.0f} MB, built in {time.monotonic() - began:.0f} s")
        if target in ("scheduler", "gateway") and size > 250:
            raise SystemExit(f"the image {target} is larger than 250 MB")
        found = docker(
            "run",
            "--rm",
            "--entrypoint=sh",
            f"octavo/{target}",
            "-c",
            "command -v pip pip3 gcc cc make || true",
        )
        if found:
            raise SystemExit(f"the image {target} has build tools: {found}")


def make_secrets(folder: Path) -> str:
    """Make what deploy/compose/tls.yml mounts, as docs/deploying.md tells; return a key that may do all."""
    octavo = [sys.executable, "-m", "octavo.cli.main"]
    run(*octavo, "certs", "--out", str(folder), "--host", "standby")
    (folder / "worker-secret").write_text(secrets.token_hex(32))
    (folder / "scheduler.toml").write_text(f'[scheduler.access]\ncache_secret = "{secrets.token_hex(32)}"\n')
    add, file = [*octavo, "keys", "add"], str(folder / "keys.toml")
    (folder / "gateway-api-key").write_text(run(*add, "--tenant", "gateway", "--role", "forward", file))
    roles = ("--role", "operator", "--role", "inference")
    key = run(*add, "--tenant", "ops", *roles, file)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.chown(path, 10001, 10001)
    return key


class Stack:
    """The compose project in one profile."""

    def __init__(self, docker: Docker, profile: str, runner: str, secrets_folder: Path) -> None:
        self._docker = docker
        self.client: list[str] = []
        """Arguments of `docker run` and `docker exec` for a client: its key."""
        self.files: list[str] = []
        """Arguments of `docker run` for a client: its files."""
        files = ["-f", "docker-compose.yml"]
        if profile == "tls":
            files += ["-f", "deploy/compose/tls.yml"]
            self.client = ["-e", f"OCTAVO_API_KEY={make_secrets(secrets_folder)}"]
            self.files = [f"--volume={secrets_folder}:/run/secrets:ro"]
            for name, file in (("CA", "ca"), ("CERT", "client"), ("KEY", "client-key")):
                self.files += ["-e", f"OCTAVO_TLS_{name}=/run/secrets/{file}.pem"]
        self._command = [*docker.compose(), *files, "-p", PROJECT]
        ports = {f"OCTAVO_{name}_PORT": "0" for name in ("SCHEDULER", "STANDBY", "GATEWAY_A", "GATEWAY_B")}
        self._environment = {**os.environ, **ports, "COMPOSE_PROFILES": "cpu", "OCTAVO_RUNNER": runner}
        self._environment["OCTAVO_SECRETS"] = str(secrets_folder)

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Run a command of compose."""
        return run(*self._command, *arguments, check=check, env=self._environment)

    def containers(self, service: str) -> list[str]:
        """Return the containers of a service, the oldest first."""
        return self.compose("ps", "-q", service).split()

    def is_healthy(self, *services: str) -> bool:
        """Return whether every container of the services is."""
        ids = [one for service in services for one in self.containers(service)]
        states = self._docker("inspect", "-f", "{{.State.Health.Status}}", *ids).split()
        return bool(states) and set(states) == {"healthy"}

    def status(self, service: str = "scheduler") -> dict[str, Any]:
        """Return what a scheduler says of itself; empty when it cannot be asked."""
        ids = self.containers(service)
        told = (
            self._docker("exec", *self.client, ids[0], "octavo", "status", "--json", check=False)
            if ids
            else ""
        )
        return dict(json.loads(told)) if told else {}

    def num_ready(self) -> int:
        """Return how many workers the preferred scheduler has."""
        return sum(worker["state"] == "ready" for worker in self.status().get("workers", []))

    def scale(self, workers: int) -> None:
        """Have so many workers."""
        self.compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"worker={workers}")

    def kill(self, container: str) -> None:
        """Kill its process as a fault would; after `docker kill` the engine would not start it anew."""
        pid = int(self._docker("inspect", "-f", "{{.State.Pid}}", container))
        os.kill(pid, signal.SIGKILL)
        restarts = ("inspect", "-f", "{{.RestartCount}} {{.State.Running}}", container)
        wait("started anew by the engine", lambda: self._docker(*restarts) == "1 true")


@contextlib.contextmanager
def traffic(docker: Docker, stack: Stack, profile: str) -> Iterator[Any]:
    """Ask from a container beside the stack; yields what tells the outcome, which ends it."""
    scheme = "https" if profile == "tls" else "http"
    network = f"--network={PROJECT}_default"
    script = f"--volume={ROOT}/deploy/compose/traffic.py:/traffic.py:ro"
    asked = ["--endpoint", "scheduler:50051,standby:50051", "--gateway", f"{scheme}://gateway:8000"]
    options = [network, script, *stack.client, *stack.files]
    command = ["run", "-d", *options, "--entrypoint=python", "octavo/gateway", "/traffic.py", *asked]
    container = docker(*command)

    def told() -> list[str]:
        return docker("logs", container, stderr=subprocess.STDOUT).splitlines()

    def end() -> dict[str, Any]:
        docker("stop", "-t", "150", container)
        *problems, outcome = told()
        print("\n".join(problems[-10:]))
        say(f"traffic: {outcome}")
        return dict(json.loads(outcome))

    try:
        time.sleep(STEADY_S)
        if docker("inspect", "-f", "{{.State.Running}}", container) != "true":
            raise SystemExit("\n".join(["the traffic ended by itself:", *told()[-20:]]))
        yield end
    finally:
        docker("rm", "-f", container, check=False)


def try_profile(docker: Docker, profile: str, runner: str) -> dict[str, Any]:
    """Bring the stack up, disturb it under traffic, take it down; return what the requests came to."""
    say(f"profile {profile}")
    folder = tempfile.mkdtemp(prefix="octavo-secrets-")
    stack = Stack(docker, profile, runner, Path(folder))
    try:
        stack.compose("up", "-d", "--no-build")
        everything = ("worker", "scheduler", "standby", "gateway-a", "gateway-b")
        wait("up, and all healthy", lambda: stack.is_healthy(*everything))
        with traffic(docker, stack, profile) as outcome:
            stack.scale(3)
            wait("3 workers serve", lambda: stack.num_ready() == 3)
            time.sleep(STEADY_S)
            say("killing a worker")
            stack.kill(stack.containers("worker")[0])
            wait("3 workers serve again", lambda: stack.num_ready() == 3)
            say("killing the scheduler")
            stack.kill(stack.containers("scheduler")[0])
            wait("the scheduler has its workers back", lambda: stack.num_ready() == 3)
            time.sleep(STEADY_S)
            say("restarting a gateway")
            docker("restart", "-t", "40", stack.containers("gateway-a")[0])
            wait("the gateway is healthy", lambda: stack.is_healthy("gateway-a"))
            say("scaling to 1 worker")
            stack.scale(1)
            wait("1 worker serves", lambda: stack.num_ready() == 1)
            time.sleep(STEADY_S)
            told: dict[str, Any] = outcome()
        for service in everything:
            docker("stop", "-t", "40", *stack.containers(service))
            codes = docker("inspect", "-f", "{{.State.ExitCode}}", *stack.containers(service)).split()
            if set(codes) != {"0"}:
                raise SystemExit(f"{service} ended with {codes}")
    except BaseException:
        print(stack.compose("logs", "--no-color", "--tail", "40", check=False)[-8000:])
        raise
    finally:
        stack.compose("down", "-v", "-t", "5", check=False)
        shutil.rmtree(folder)
    return told


def main() -> None:
    """Try each profile; exit with 1 if a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runner", default="torch", choices=["torch", "sim"], help="sim is light on a small machine"
    )
    parser.add_argument("--profile", action="append", choices=["cpu", "tls"], help="default: both")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and tidy up
    with engine() as docker:
        build(docker, make_base(docker))
        told = {
            name: try_profile(docker, name, arguments.runner) for name in arguments.profile or ["cpu", "tls"]
        }
    failed = sum(one.get("failed", 0) for one in told.values())
    asked = sum(one.get("grpc", 0) + one.get("http", 0) for one in told.values())
    say(f"{asked} requests, {failed} failed")
    sys.exit(1 if failed or not asked else 0)


if __name__ == "__main__":
    main()
