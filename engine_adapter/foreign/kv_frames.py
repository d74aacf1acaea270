"""KV events as vLLM and SGLang publish them: a msgpack batch [time, events, data-parallel rank]. Pure.

An event is a map in which `type` names it (vLLM 0.32, SGLang 0.5.23). Older versions send it as an array that
begins with the name, and later fields may be missing."""

from typing import Any

import msgspec

BlockHash = int | bytes
"""The server's own hash of a block: the last 64 bits as a number, or (vLLM) all of SHA-256."""


class BlocksStored(msgspec.Struct, frozen=True):
    """Consecutive blocks were cached after the block `parent_block_hash` (None: from the start of a
    prompt)."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """What a block's hash covers beside its tokens, one entry per block: the name of the LoRA adapter,
    [identifier, offset] of images and other media, the cache salt in the first block of a prompt, bytes for
    prompt embeddings. None: this version does not say."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None
    """Salt of the request that stored the blocks (SGLang; vLLM names it in `extra_keys`)."""


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Copies of blocks were dropped, one of each hash."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlocksCleared(msgspec.Struct, frozen=True):
    """All blocks were dropped."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared
_KINDS: dict[str, type[BlocksStored] | type[BlocksRemoved] | type[BlocksCleared]] = {
    "BlockStored": BlocksStored,
    "BlockRemoved": BlocksRemoved,
    "AllBlocksCleared": BlocksCleared,
}


class UnreadableEvents(ValueError):
    """A message on the event socket that is no batch of KV events."""


def events_of(payload: bytes) -> tuple[BlockEvent, ...]:
    """Decode a batch. Kinds of events that are unknown here are left out. UnreadableEvents says what is
    wrong."""
    try:
        batch = msgspec.msgpack.decode(payload)
        listed = batch["events"] if isinstance(batch, dict) else batch[1]
        found = [_event(one) for one in listed]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError) as error:
        raise UnreadableEvents(f"no batch of KV events: {str(error) or type(error).__name__}") from error
    return tuple(event for event in found if event is not None)


def _event(raw: Any) -> BlockEvent | None:
    if isinstance(raw, dict):
        kind = _KINDS.get(raw["type"])
        return None if kind is None else msgspec.convert(raw, kind)
    kind = _KINDS.get(raw[0])
    if kind is None:
        return None
    return msgspec.convert(dict(zip(kind.__struct_fields__, raw[1:], strict=False)), kind)
