"""Which channels go through a proxy: none to this machine, whatever it is called."""

from __future__ import annotations

import pytest
from octavo.protocol.proxy import proxy_of, proxy_options

PROXY = {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051",
        "127.8.9.1:50051",
        "localhost:50051",
        "LOCALHOST:50051",
        "localhost.:50051",
        "worker.localhost:50051",
        "[::1]:50051",
        "[::ffff:127.0.0.1]:50051",
        "0.0.0.0:50051",
        "[::]:50051",
        "ipv4:127.0.0.1:50051",
        "ipv6:[::1]:50051",
        "ipv6:%5B::1%5D:50051",
        "dns:localhost:50051",
        "dns:///localhost:50051",
        "dns://8.8.8.8/localhost:50051",
        "unix:/run/octavo.sock",
        "unix-abstract:octavo",
    ],
)
def test_this_machine_is_reached_directly(target: str) -> None:
    assert proxy_of(target, PROXY) is None
    assert proxy_options(target, PROXY) == (("grpc.enable_http_proxy", 0),)


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
@pytest.mark.parametrize(
    "target",
    [
        "worker.example:50061",
        "10.0.0.7:50061",
        "dns:worker-0:50061",
        "[2001:db8::1]:50061",
        "127.example:1",
    ],
)
def test_elsewhere_the_environment_decides(name: str, target: str) -> None:
    assert proxy_of(target, {name: "http://proxy:3128"}) == "http://proxy:3128"
    assert proxy_options(target, {name: "http://proxy:3128"}) == ()
    assert proxy_of(target, {name.upper(): "http://proxy:3128"}) is None  # gRPC does not read it.
    assert proxy_of(target, {}) is None


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY", "no_grpc_proxy"])
def test_exceptions_count_in_both_spellings(name: str) -> None:
    env = {**PROXY, name: "example.com, .cluster.local"}

    assert proxy_of("a.example.com:1", env) is None
    assert proxy_of("example.com:1", env) is None
    assert proxy_of("worker.default.svc.cluster.local:1", env) is None
    assert proxy_of("badexample.com:1", env) == "http://proxy:3128"
    assert proxy_of("anything:1", {**PROXY, name: "*"}) is None
