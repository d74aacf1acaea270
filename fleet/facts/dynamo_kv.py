"""KV cache events and load metrics of an engine, in Dynamo's own format."""

from typing import Any, Literal

import msgspec


class KvBlock(msgspec.Struct, frozen=True):
    """One stored block in Dynamo's format: `block_hash` is the chained sequence hash, `tokens_hash` the local
    hash.
    """

    block_hash: int
    tokens_hash: int
    mm_extra_info: Any = None
    """Dynamo's data about images and other media; forwarded unread"""


class KvStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks after `parent_hash` (None: from the start of the prompt)."""

    blocks: tuple[KvBlock, ...]
    parent_hash: int | None = None
    start_position: int | None = None


class KvRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Removed blocks, by sequence hash."""

    block_hashes: tuple[int, ...]


class KvChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `stored` and `removed`. A cleared cache is the string "cleared" instead
    (`KvEvent.data`).
    """

    stored: KvStored | None = None
    removed: KvRemoved | None = None


class KvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's inner event. As JSON it is the argument of `RadixTree.apply_event`."""

    event_id: int
    data: KvChange | Literal["cleared"]
    dp_rank: int = 0


class RoutedKvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One element of the array that is Dynamo's payload on `kv-events`."""

    worker_id: int
    event: KvEvent
    storage_tier: str = "device"
    residency_domain: str = "worker"
    epoch: int = 0
    """placement epoch in which the rank's cache was last cleared, or in which it began to report. Roost's
    addition, which other readers ignore: after a change of attention, events of older epochs say nothing
    """


class KvMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's payload on `kv_metrics`: the load of one rank."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    running: int | None = None
    """sequences decoding. This field and the next two are Roost's additions, which other readers ignore"""
    waiting: int | None = None
    """requests not yet admitted"""
    step_seconds: float | None = None
    """median duration of the engine's last decode-only steps; None: no recent ones"""
