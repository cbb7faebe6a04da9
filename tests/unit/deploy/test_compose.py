"""The compose files: commands, variables and health checks are ours, and nothing is left open."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.unit.deploy.command_lines import check_environment, check_words

ROOT: Final = Path(__file__).resolve().parents[3]
FILES: Final = sorted([ROOT / "docker-compose.yml", *(ROOT / "deploy" / "compose").glob("*tls.yml")])


def services(path: Path) -> dict[str, dict[str, Any]]:
    """Return the services of a file, with the defaults of its variables in place."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text(encoding="utf-8"))
    return dict(yaml.safe_load(text)["services"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_and_variables_are_ours(path: Path) -> None:
    for service in services(path).values():
        environment = {"OCTAVO_INSECURE": "true"} | service.get("environment", {})
        check_environment(environment)
        words = [*service.get("entrypoint", ["octavo"])[1:], *service.get("command", [])]
        if words and service.get("image", "octavo").startswith("octavo"):
            check_words(words, environment)
        check = service.get("healthcheck", {}).get("test", [])
        if check[:2] == ["CMD", "octavo"]:
            check_words(check[2:])


def test_health_checks_of_the_images_are_ours() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    commands = [
        yaml.safe_load(line.split("CMD ", 1)[1]) for line in lines if re.match(r"(HEALTHCHECK|CMD) ", line)
    ]
    assert len(commands) >= 6
    for words in commands:
        check_words(words[1:] if words[0] == "octavo" else words, {"OCTAVO_INSECURE": "true"})


def test_ports_are_published_on_the_loopback_address_only() -> None:
    for name, service in services(ROOT / "docker-compose.yml").items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_services_run_with_a_read_only_root_and_without_capabilities() -> None:
    for name, service in services(ROOT / "docker-compose.yml").items():
        if service["image"].startswith("octavo/"):
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert service["stop_grace_period"] == "40s", name
