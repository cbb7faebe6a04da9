from __future__ import annotations

import pytest
from octavo.protocol.steps import Geometry, PoolReport

from worker_svc.api.session import KEYS_PER_MESSAGE_BYTES, Cache, Terms, welcomes
from worker_svc.engine.limits import Limit, Limits

TERMS = Terms(
    worker_id="w",
    incarnation="i",
    geometry=Geometry(block_size=16, num_blocks=10**6),
    max_model_len=1024,
    vocab_size=100,
    limits=Limits(Limit(8), Limit(512)),
)


@pytest.mark.parametrize(
    ("num_device_keys", "num_host_keys", "messages"),
    [(0, 0, 1), (1, 0, 1), (65_536, 65_536, 1), (65_537, 0, 2), (10, 200_000, 4)],
)
def test_welcome_comes_in_as_many_messages_as_the_keys_take(
    num_device_keys: int, num_host_keys: int, messages: int
) -> None:
    device_keys = b"".join(index.to_bytes(16, "big") for index in range(num_device_keys))
    host_keys = b"".join(index.to_bytes(16, "little") for index in range(num_host_keys))
    found = list(welcomes(TERMS, Cache(device_keys, host_keys, PoolReport(1, 2, 3))))
    assert [welcome.last for welcome in found] == [False] * (messages - 1) + [True]
    assert b"".join(welcome.device_keys for welcome in found) == device_keys
    assert b"".join(welcome.host_keys for welcome in found) == host_keys
    assert all(len(welcome.device_keys) % 16 == 0 for welcome in found)
    assert max(welcome.ByteSize() for welcome in found) < 3 * KEYS_PER_MESSAGE_BYTES
    assert all(welcome.pool.evictable == 2 for welcome in found)
