"""Names of KV blocks by content: chained SHA-256, so equal names mean equal tokens at equal positions under one salt.

A cryptographic digest, never Python's `hash()`: that one is predictable, differs between processes, and
collides on purpose-made input, which would hand one user's KV entries to another.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

_VERSION = b"jaxserve/prefix/1"


def root_digest(cache_salt: str | None) -> bytes:
    """Start of a chain. Salts are type-tagged and length-prefixed: no salt, "" and "x" start different chains.

    Raises:
      TypeError: the salt is neither a string nor None.
    """
    if cache_salt is None:
        tagged = b"none:"
    elif isinstance(cache_salt, str):
        data = cache_salt.encode("utf-8", "surrogatepass")
        tagged = b"salt:" + struct.pack("<Q", len(data)) + data
    else:
        raise TypeError(f"cache_salt must be a string, got {type(cache_salt).__name__}")
    return hashlib.sha256(struct.pack("<Q", len(_VERSION)) + _VERSION + tagged).digest()


def private_root_digest(cache_salt: str | None, owner: str) -> bytes:
    """Start of a chain that nobody but `owner` has: names for blocks that are not to be shared."""
    data = owner.encode("utf-8", "surrogatepass")
    return hashlib.sha256(root_digest(cache_salt) + b"owner:" + struct.pack("<Q", len(data)) + data).digest()


def block_digests(previous: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Digests of full blocks that follow each other: each of the chain before it and its token ids as little-endian
    64-bit numbers.

    Args:
      previous: of the block before them, or the root.
      token_ids: theirs; what fills no block at the end is left out.
    """
    numbers = array("Q", token_ids)  # all at once, in a quarter of the time that block by block takes
    if sys.byteorder == "big":
        numbers.byteswap()
    data = numbers.tobytes()
    num_bytes = block_size * numbers.itemsize
    digests = []
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        previous = hashlib.sha256(previous + data[start : start + num_bytes]).digest()
        digests.append(previous)
    return digests
