"""Identity of token blocks, equal to Dynamo's: a local hash per block and a chained sequence hash per prefix.

local = xxh3_64(token ids as u32 little endian, seed 1337); sequence hash of the first block = its local hash, of the next =
xxh3_64(parent || local as u64 little endian, seed 1337). All hashes are unsigned 64-bit: never pass them through floats,
signed arrays or signed OpenTelemetry attributes.

A LoRA adapter and a cache namespace (a request's `cache_salt`) change the seed of local hashes, and so every hash of the prompt:
seed = 1337 + xxh3_64(adapter, seed 0) + xxh3_64(namespace, seed 1) modulo 2^64; an empty name adds nothing. Found by inverting the
hashes that `compute_block_hash_for_seq` of ai-dynamo-runtime 1.6.1 makes of blocks of one token, and tested against it. The salt keeps
equal prompts of two tenants apart; it does not hide a prompt from a reader of KV events, because xxh3 is not a cryptographic hash.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

import xxhash

SEED = 1337
BLOCK_SIZE = 16
"""Tokens per KV block unless an engine says otherwise."""
_ANY_U64 = (1 << 64) - 1

_PAIR = struct.Struct("<QQ")


def words(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. OverflowError for an id outside u32."""
    ids = array("I", tokens)  # three times as fast as numpy for a list
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def salted_seed(namespace: str = "", adapter: str = "") -> int:
    """u64 seed of the local hashes of prompts in a cache namespace, under a LoRA adapter; SEED where both are empty."""
    seed = SEED
    if adapter:
        seed += xxhash.xxh3_64_intdigest(adapter.encode("utf-8", "surrogatepass"), 0)
    if namespace:
        seed += xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass"), 1)
    return seed & _ANY_U64


def contents(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    """The bytes of each *full* block of `tokens`, as `words` makes them."""
    full = len(tokens) // block_size
    raw = words(tokens[: full * block_size])
    width = 4 * block_size
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def local_hash(content: bytes, seed: int = SEED) -> int:
    """u64 local hash of a block by its bytes. seed: as `salted_seed` makes it."""
    return xxhash.xxh3_64_intdigest(content, seed)


def local_hashes(tokens: Sequence[int], block_size: int = BLOCK_SIZE, seed: int = SEED) -> list[int]:
    """u64 local hash of each *full* block of `tokens`; a partial last block has none. seed: as `salted_seed` makes it."""
    full = len(tokens) // block_size
    raw = words(tokens[: full * block_size])
    width = 4 * block_size
    return [xxhash.xxh3_64_intdigest(raw[at : at + width], seed) for at in range(0, len(raw), width)]


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


def extend(chained: list[int], raw: bytes, width: int, seed: int = SEED) -> None:
    """Append to a chain's u64 sequence hashes those of the blocks that follow.

    raw: the blocks' bytes, whole, `width` bytes each (as `words` makes them). seed: of their local hashes, as `salted_seed` makes it.
    """
    digest, pack, own = xxhash.xxh3_64_intdigest, _PAIR.pack, SEED
    start = 0
    if raw and not chained:
        chained.append(digest(raw[:width], seed))
        start = width
    for at in range(start, len(raw), width):
        chained.append(digest(pack(chained[-1], digest(raw[at : at + width], seed)), own))
