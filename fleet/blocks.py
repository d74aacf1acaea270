"""Identity of token blocks, equal to Dynamo's: a local hash per block and a chained sequence hash per prefix.

local = xxh3_64(token ids as u32 little endian, seed 1337); sequence hash of the first block = its local hash, of the next =
xxh3_64(parent || local as u64 little endian, seed 1337). All hashes are unsigned 64-bit: never pass them through floats,
signed arrays or signed OpenTelemetry attributes.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

import xxhash

SEED = 1337
BLOCK_SIZE = 16
"""Tokens per KV block unless an engine says otherwise."""

_PAIR = struct.Struct("<QQ")


def words(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. OverflowError for an id outside u32."""
    ids = array("I", tokens)  # three times as fast as numpy for a list
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def local_hashes(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[int]:
    """u64 local hash of each *full* block of `tokens`; a partial last block has none."""
    full = len(tokens) // block_size
    raw = words(tokens[: full * block_size])
    width = 4 * block_size
    return [xxhash.xxh3_64_intdigest(raw[at : at + width], SEED) for at in range(0, len(raw), width)]


def chain(parent: int | None, local: int) -> int:
    """u64 sequence hash of a block with this local hash behind the prefix `parent` (None: the first block)."""
    return local if parent is None else xxhash.xxh3_64_intdigest(_PAIR.pack(parent, local), SEED)


def sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """u64 sequence hash of each block of a chain that starts behind `parent`."""
    chained: list[int] = []
    for block in local:
        parent = chain(parent, block)
        chained.append(parent)
    return chained


def extend(chained: list[int], raw: bytes, width: int) -> None:
    """Append to a chain's u64 sequence hashes those of the blocks that follow: `raw` holds them whole, `width` bytes each (as `words` makes them)."""
    digest, pack, seed = xxhash.xxh3_64_intdigest, _PAIR.pack, SEED
    start = 0
    if raw and not chained:
        chained.append(digest(raw[:width], seed))
        start = width
    for at in range(start, len(raw), width):
        chained.append(digest(pack(chained[-1], digest(raw[at : at + width], seed)), seed))
