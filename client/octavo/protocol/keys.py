"""Content keys of KV blocks: a chain of 16-byte BLAKE2b digests (architecture, section 4)."""

from __future__ import annotations

import array
from collections.abc import Sequence
from hashlib import blake2b

from octavo.protocol.steps import KEY_BYTES


def root_key(revision: str, adapter: str, kv_dtype: str, block_size: int, salt: bytes) -> bytes:
    """Return the root of a chain. What differs here shares nothing."""
    state = blake2b(digest_size=KEY_BYTES)
    for part in (revision.encode(), adapter.encode(), kv_dtype.encode(), str(block_size).encode(), salt):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the block that holds `token_ids` (one whole block) after `parent`."""
    return blake2b(parent + array.array("I", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


def chain(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of all full blocks of `token_ids`."""
    keys = []
    parent = root
    packed = array.array("I", token_ids).tobytes()
    stride = block_size * array.array("I").itemsize
    for start in range(0, len(packed) - stride + 1, stride):
        parent = blake2b(parent + packed[start : start + stride], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys
