from __future__ import annotations

import socket

import pytest
from octavo.service.address import AddressTaken, check_address, is_loopback, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("[::1]:0", "::1", 0),
        ("worker-0.workers.svc:65535", "worker-0.workers.svc", 65535),
    ],
)
def test_address_is_host_and_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "localhost", ":1", "a:", "a:65536", "a:-1", "a:x", "a b:1", "::1:50051", "[::1:1", "a:1 "]
)
def test_address_that_is_not_host_and_port_is_refused_with_what_it_was(address: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port, got '") as caught:
        split_address(address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - compared, not bound
        ("::", False),
        ("10.0.0.5", False),
        ("::ffff:10.0.0.5", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("", False),
    ],
)
def test_host_is_loopback_only_when_nobody_else_can_reach_it(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_port_that_is_free_is_free_afterwards_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)


def test_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken) as caught:
            check_address("127.0.0.1", port)
    assert str(caught.value) == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_host_that_does_not_exist_is_told_in_one_line() -> None:
    with pytest.raises(AddressTaken, match=r"^cannot listen on no\.such\.host\.invalid:1: .+$"):
        check_address("no.such.host.invalid", 1)
