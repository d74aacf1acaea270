"""Identity of token blocks, equal to Dynamo's: a local hash per block and a chained sequence hash per prefix.

local = xxh3_64(token ids as u32 little endian, seed 1337). The sequence hash of the first block is its local
hash. The next one is xxh3_64(parent || local as u64 little endian, seed 1337). All hashes are unsigned
64-bit. Never pass them through floats, signed arrays or signed OpenTelemetry attributes.

A LoRA adapter and a cache namespace (a request's `cache_salt`) change the seed of local hashes, and so every
hash of the prompt: seed = 1337 + xxh3_64(adapter, seed 0) + xxh3_64(namespace, seed 1) modulo 2^64; an empty
name adds nothing. The formula was derived from the output of `compute_block_hash_for_seq` of
ai-dynamo-runtime 1.6.1 for blocks of one token, and is tested against it. The salt separates equal prompts of
two tenants. It does not hide a prompt from a reader of KV events: xxh3 is not a cryptographic hash.
"""

import struct
import sys
from array import array
from collections.abc import MutableSequence, Sequence

import xxhash

SEED = 1337
BLOCK_SIZE = 16
"""Tokens per KV block, unless an engine reports another size."""
_ANY_U64 = (1 << 64) - 1

_PAIR = struct.Struct("<QQ")


def words(tokens: Sequence[int]) -> bytes:
    """Encode token ids as u32 little endian. OverflowError for an id outside u32."""
    ids = array("I", tokens)  # three times as fast as numpy for a list
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def salted_seed(namespace: str = "", adapter: str = "") -> int:
    """Return the u64 seed of local hashes in a cache namespace and under a LoRA adapter; SEED if both are
    empty.
    """
    seed = SEED
    if adapter:
        seed += xxhash.xxh3_64_intdigest(adapter.encode("utf-8", "surrogatepass"), 0)
    if namespace:
        seed += xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass"), 1)
    return seed & _ANY_U64


def contents(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    """Return the bytes of each *full* block of `tokens`, encoded by `words`."""
    full = len(tokens) // block_size
    raw = words(tokens[: full * block_size])
    width = 4 * block_size
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def local_hash(content: bytes, seed: int = SEED) -> int:
    """Return the u64 local hash of a block's bytes. seed: from `salted_seed`."""
    return xxhash.xxh3_64_intdigest(content, seed)


def local_hashes(tokens: Sequence[int], block_size: int = BLOCK_SIZE, seed: int = SEED) -> list[int]:
    """Return the u64 local hash of each *full* block of `tokens`; a partial last block has none. seed: from
    `salted_seed`.
    """
    full = len(tokens) // block_size
    raw = words(tokens[: full * block_size])
    width = 4 * block_size
    return [xxhash.xxh3_64_intdigest(raw[at : at + width], seed) for at in range(0, len(raw), width)]


def chain(parent: int | None, local: int) -> int:
    """Return the u64 sequence hash of a block with this local hash after the prefix `parent` (None: the first
    block)."""
    return local if parent is None else xxhash.xxh3_64_intdigest(_PAIR.pack(parent, local), SEED)


def sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """Return the u64 sequence hash of each block of a chain that starts after `parent`."""
    chained: list[int] = []
    for block in local:
        parent = chain(parent, block)
        chained.append(parent)
    return chained


def extend(chained: MutableSequence[int], raw: bytes, width: int, seed: int = SEED) -> None:
    """Append the u64 sequence hashes of the following blocks to a chain.

    raw: bytes of the blocks, complete, `width` bytes each (from `words`). seed: of their local hashes, from
    `salted_seed`.
    """
    digest, pack, own = xxhash.xxh3_64_intdigest, _PAIR.pack, SEED
    start = 0
    if raw and not chained:
        chained.append(digest(raw[:width], seed))
        start = width
    for at in range(start, len(raw), width):
        chained.append(digest(pack(chained[-1], digest(raw[at : at + width], seed)), own))
