"""Who may operate a scheduler, by where the call comes from."""

from __future__ import annotations

import grpc
import pytest
from octavo.keys import KeyFile

from scheduler_svc.admission.access import Access
from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics

LOCAL = (
    "ipv4:127.0.0.1:4711",
    "ipv4:127.8.9.10:4711",
    "ipv6:%5B::1%5D:4711",
    "ipv6:[::1]:4711",
    "ipv6:%5B::ffff:127.0.0.1%5D:4711",
    "unix:",
    "unix:/run/octavo.sock",
    "unix-abstract:octavo",
)
REMOTE = (
    "ipv4:10.0.0.5:4711",
    "ipv4:0.0.0.0:4711",
    "ipv4:128.0.0.1:4711",
    "ipv6:%5Bfd00::5%5D:4711",
    "ipv6:%5Bfe80::1%25eth0%5D:4711",
    "ipv6:%5B::ffff:10.0.0.5%5D:4711",
    "",
    "unknown",
)


@pytest.mark.parametrize("peer", LOCAL)
def test_peer_on_the_own_machine_may_operate_without_keys(peer: str) -> None:
    Access(SchedulerMetrics()).check_peer(peer)


@pytest.mark.parametrize("peer", REMOTE)
def test_peer_elsewhere_may_not_operate_without_keys_and_is_told_what_to_do(peer: str) -> None:
    metrics = SchedulerMetrics()
    with pytest.raises(ServiceError, match="--key-file") as caught:
        Access(metrics).check_peer(peer)
    assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.reason == "LOOPBACK_REQUIRED"
    counted = metrics.registry.get_sample_value(
        "octavo_access_refusals_total", {"reason": "LOOPBACK_REQUIRED"}
    )
    assert counted == 1


@pytest.mark.parametrize("peer", [*LOCAL, *REMOTE])
def test_peer_does_not_matter_where_there_are_keys(peer: str) -> None:
    access = Access(SchedulerMetrics())
    access.key_file = KeyFile({}, ())
    access.check_peer(peer)
