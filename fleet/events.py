"""Everything said on the bus: a closed, tagged union of past-tense facts, and the two payloads in Dynamo's own form.

Every `worker_id` is a random u64 per incarnation of an engine; `rank` is Dynamo's `dp_rank`. Sequence numbers, publisher
and time travel in the envelope (`bus.codec`), not here. A field that a reader does not know is ignored.
"""

from typing import Any, Literal

import msgspec

from fleet.experts import ModelShape
from fleet.layout import Layout
from fleet.placement import PlacementRecord
from fleet.popularity import ExpertTable
from fleet.timing import EngineSpeed


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the tagged union; the tag is the class name."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can report. A missing capability is declared, and readers do without."""

    kv_events: bool = True
    load: bool = True
    experts: bool = True
    token_ids: bool = True
    """accepts token-id prompts and returns the ids of every chunk"""


class EngineJoined(Event, frozen=True, kw_only=True):
    """An engine serves from now on. Stored; also the answer to a `DescribeEngine` request."""

    engine: str
    worker_id: int
    model: str
    node: str
    urls: tuple[str, ...]
    """base URL of each rank's HTTP face, index = rank; one URL for an engine that is one target"""
    block_size: int
    kv_blocks: int
    """KV blocks per rank"""
    max_context: int
    """tokens, prompt and completion together"""
    max_batch_tokens: int
    """tokens one rank computes in one step"""
    layout: Layout | None = None
    shape: ModelShape | None = None
    """None: the engine says nothing of experts"""
    placement: PlacementRecord | None = None
    tokenizer: str | None = None
    """sha256 (hex) of the tokenizer archive in the blob store (`bus.put_blob`); None: unknown"""
    speed: EngineSpeed | None = None
    capabilities: Capabilities = Capabilities()


class EngineLeft(Event, frozen=True, kw_only=True):
    """An engine stopped serving on purpose. Stored."""

    engine: str
    worker_id: int
    reason: str


class EngineHeartbeat(Event, frozen=True, kw_only=True):
    """Spoken by rank 0 once a second; three seconds of silence mean death. Not stored."""

    engine: str
    worker_id: int
    epoch: int
    """placement epoch served"""


class ExpertsActivated(Event, frozen=True, kw_only=True):
    """What one rank's requests activated in an interval. Not stored.

    `counts` are (token, k) pairs of the tokens that live on this rank (demand), wherever their experts are.
    Tokens served from the prefix cache activate nothing: they are reported in `cached_tokens`, not as zeros.
    """

    engine: str
    worker_id: int
    rank: int
    model: str
    epoch: int
    seconds: float
    """length of the interval"""
    tokens: int
    """computed tokens: the exposure of `counts`"""
    cached_tokens: int
    counts: ExpertTable


class ProfilePublished(Event, frozen=True, kw_only=True):
    """The tracker's global profile of a model: probabilities per layer. Not stored; asked for with `DescribeProfile`."""

    model: str
    version: int
    tokens: float
    """decayed exposure behind the profile"""
    profile: ExpertTable


class DemandPublished(Event, frozen=True, kw_only=True):
    """Tokens per second that requests living on one rank send to each expert. Not stored."""

    engine: str
    worker_id: int
    rank: int
    model: str
    version: int
    tokens_per_second: float
    demand: ExpertTable


class PlacementCommitted(Event, frozen=True, kw_only=True):
    """An engine serves this placement from now on. Stored."""

    engine: str
    worker_id: int
    layout: Layout
    placement: PlacementRecord
    plan: str | None = None


class DescribeEngine(Event, frozen=True, kw_only=True):
    """Request to one engine: answer with your `EngineJoined`."""

    worker_id: int


class DescribeProfile(Event, frozen=True, kw_only=True):
    """Request to the tracker: answer with the `ProfilePublished` of a model; uniform, with 0 tokens, before anything was reported.
    `RequestRefused` for a model that no engine has named."""

    model: str


class KvSnapshotRequested(Event, frozen=True, kw_only=True):
    """Request to one rank: what does your KV cache hold, as of which sequence number of your kv-events?"""

    worker_id: int
    rank: int


class KvBlock(msgspec.Struct, frozen=True):
    """One stored block in Dynamo's form: `block_hash` is the chained sequence hash, `tokens_hash` the local one."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: Any = None
    """what Dynamo says of images and the like; passed on unread"""


class KvStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow one another behind `parent_hash` (None: from the start of the prompt)."""

    blocks: tuple[KvBlock, ...]
    parent_hash: int | None = None
    start_position: int | None = None


class KvRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are gone, by sequence hash."""

    block_hashes: tuple[int, ...]


class KvChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `stored` and `removed`; a cleared cache is the string "cleared" in its place (`KvEvent.data`)."""

    stored: KvStored | None = None
    removed: KvRemoved | None = None


class KvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's inner event; as JSON it is what `RadixTree.apply_event` takes."""

    event_id: int
    data: KvChange | Literal["cleared"]
    dp_rank: int = 0


class RoutedKvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's payload on `kv-events` is an array of these."""

    worker_id: int
    event: KvEvent
    storage_tier: str = "device"
    residency_domain: str = "worker"


class KvMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's payload on `kv_metrics`: the load of one rank."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    running: int | None = None
    """Roost's addition: sequences decoding; other readers ignore it"""
    waiting: int | None = None
    """Roost's addition: requests not yet admitted"""


class KvSnapshot(Event, frozen=True, kw_only=True):
    """Answer to `KvSnapshotRequested`: applying `events` to an empty cache gives the state after message `sequence` of `publisher_id`."""

    worker_id: int
    rank: int
    publisher_id: int
    sequence: int
    """last kv-events message that is contained; -1: none was sent yet"""
    events: tuple[KvEvent, ...]


class RequestRefused(Event, frozen=True, kw_only=True):
    """Answer to a request that cannot be met: whose fault it is and what to do."""

    reason: str


AnyEvent = (
    EngineJoined
    | EngineLeft
    | EngineHeartbeat
    | ExpertsActivated
    | ProfilePublished
    | DemandPublished
    | PlacementCommitted
    | DescribeEngine
    | DescribeProfile
    | KvSnapshotRequested
    | KvSnapshot
    | RequestRefused
)
"""The closed union. Unknown tags are counted and dropped by the codec, never fatal."""

STORED = (EngineJoined, EngineLeft, PlacementCommitted)
"""Kinds that JetStream keeps and replays; everything else is telemetry, repaired by snapshots."""
