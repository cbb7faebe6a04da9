"""Every overlay, rendered by kubectl, against the schemas of the Kubernetes API and our own flags."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from tests.unit.deploy.command_lines import check_environment, check_words

KUBERNETES: Final = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS: Final = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
API: Final = "1.32"
CUSTOM: Final = {
    "Certificate": "commonName dnsNames duration ipAddresses isCA issuerRef privateKey renewBefore "
    "secretName usages",
    "Issuer": "ca selfSigned",
    "ServiceMonitor": "endpoints selector",
    "ScaledObject": "advanced cooldownPeriod maxReplicaCount minReplicaCount pollingInterval "
    "scaleTargetRef triggers",
    "LeaderWorkerSet": "replicas leaderWorkerTemplate",
}
"""What we set of kinds that the API itself does not have."""


@pytest.fixture(autouse=True)
def _needs_kubectl() -> None:
    if shutil.which("kubectl") is None:
        assert not os.environ.get("OCTAVO_REQUIRE_KUBECTL"), "kubectl is missing"
        pytest.skip("needs kubectl")


@cache
def _rendered(folder: Path) -> tuple[dict[str, Any], ...]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def objects(overlay: str) -> tuple[dict[str, Any], ...]:
    return _rendered(KUBERNETES / "overlays" / overlay)


def templates(overlay: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pod templates of an overlay with the names of their objects."""
    for one in objects(overlay):
        spec = one.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
            if template is not None:
                yield one["metadata"]["name"], template


def containers(overlay: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, template in templates(overlay):
        for container in template["spec"]["containers"]:
            yield name, container


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_fits_the_schemas_of_the_api(overlay: str) -> None:
    for one in objects(overlay):
        if one["kind"] in CUSTOM:
            assert set(one["spec"]) <= set(CUSTOM[one["kind"]].split()), one["metadata"]["name"]
        else:
            kubernetes_validate.validate(copy.deepcopy(one), API, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_of_an_overlay_fit_the_schemas_of_the_api(overlay: str) -> None:
    for name, template in templates(overlay):
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
        }
        kubernetes_validate.validate(copy.deepcopy(deployment), API, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_commands_and_variables_of_an_overlay_are_ours(overlay: str) -> None:
    for _, container in containers(overlay):
        variables = {one["name"]: one.get("value", "1") for one in container.get("env", ())}
        if "command" not in container:
            check_words(container["args"], variables)
        for line in container.get("args", ()) if "command" in container else ():
            _, found, words = line.partition("octavo ")
            if found:
                check_words(words.split(), variables)
        check_environment(variables)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            _check_command(container.get(probe, {}))
        _check_command(container.get("lifecycle", {}).get("preStop", {}))


def _check_command(handler: dict[str, Any]) -> None:
    words = handler.get("exec", {}).get("command", [])
    if words[:1] == ["octavo"]:
        check_words(words[1:])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_variables_that_others_are_made_of_come_before_them(overlay: str) -> None:
    for name, container in containers(overlay):
        known: set[str] = set()
        for variable in container.get("env", ()):
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= known, name
            known.add(variable["name"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_need_no_right_and_write_nowhere_but_where_it_is_mounted(overlay: str) -> None:
    for name, template in templates(overlay):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in mounts, name  # noqa: S108 # where pods may write


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_and_targets_of_an_overlay_exist(overlay: str) -> None:
    labels = [template["metadata"]["labels"] for _, template in templates(overlay)]
    index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # what the controller adds to the first pod
    labels += [one | index for one in labels]
    names = {(one["kind"], one["metadata"]["name"]) for one in objects(overlay)}
    monitored = [one["metadata"].get("labels", {}) for one in objects(overlay) if one["kind"] == "Service"]
    for one in objects(overlay):
        spec = one.get("spec", {})
        wanted = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels"),
            "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
        }.get(one["kind"])
        if wanted is not None:
            assert any(wanted.items() <= have.items() for have in labels), one["metadata"]["name"]
        if one["kind"] == "ServiceMonitor":
            wanted = spec["selector"]["matchLabels"]
            assert any(wanted.items() <= have.items() for have in monitored), one["metadata"]["name"]
        if (target := spec.get("scaleTargetRef")) is not None:
            assert (target["kind"], target["name"]) in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_killed_before_its_drain_has_ended(overlay: str) -> None:
    for name, template in templates(overlay):
        if any("livenessProbe" in container for container in template["spec"]["containers"]):
            assert template["spec"]["terminationGracePeriodSeconds"] >= 45, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_loading_and_standing_by_are_not_taken_for_stuck(overlay: str) -> None:
    for name, container in containers(overlay):
        command = container.get("livenessProbe", {}).get("exec", {}).get("command")
        if command is not None:
            assert "--alive" in command, name
        if name == "octavo-worker" and "startupProbe" in container:
            probe = container["startupProbe"]
            assert "--alive" not in probe["exec"]["command"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_plaintext_is_for_the_demo_alone(overlay: str) -> None:
    for name, container in containers(overlay):
        if container["name"] != "ranks":  # which only Ray speaks to
            variables = {one["name"] for one in container.get("env", ())}
            is_demo = overlay in ("cpu-demo", "observe")
            assert ("--insecure" in container["args"]) is is_demo, name
            assert ({"OCTAVO_TLS_CA", "OCTAVO_TLS_CERT", "OCTAVO_TLS_KEY"} <= variables) is not is_demo, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_need_no_key(overlay: str) -> None:
    for name, container in containers(overlay):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["exec"]["command"][:2] == ["octavo", "health"], name


@pytest.mark.parametrize("overlay", ["gpu", "ray", "tls"])
def test_certificates_bear_the_names_that_services_are_called_by(overlay: str) -> None:
    certificates = {
        one["metadata"]["name"]: one["spec"].get("dnsNames", [])
        for one in objects(overlay)
        if one["kind"] == "Certificate"
    }
    arguments = [word for _, container in containers(overlay) for word in container["args"]]
    endpoints = [word.removeprefix("--endpoint=") for word in arguments if word.startswith("--endpoint=")]
    called = {one.rpartition(":")[0] for endpoint in endpoints for one in endpoint.split(",")}
    assert called
    assert called <= set(certificates["octavo-scheduler"])
    for one in objects(overlay):
        if one["kind"] == "ServiceMonitor":
            (endpoint,) = one["spec"]["endpoints"]
            name = endpoint["tlsConfig"]["serverName"]
            assert endpoint["scheme"] == "https"
            assert name in certificates[one["metadata"]["name"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_of_pods_are_made_here_or_told_of(overlay: str) -> None:
    told = (KUBERNETES.parents[1] / "docs" / "deploying.md").read_text(encoding="utf-8")
    made = {one["spec"].get("secretName") for one in objects(overlay) if one["kind"] == "Certificate"}
    named = {
        volume.get("secret", {}).get("secretName")
        for _, template in templates(overlay)
        for volume in template["spec"].get("volumes", ())
    } | {
        variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name")
        for _, container in containers(overlay)
        for variable in container.get("env", ())
    }
    for name in named - made - {None}:
        assert f"secret generic {name} " in told
