"""Facts about an engine: it started, lives, left; a rank was drained; a configuration changed."""

import msgspec

from fleet.event import Event
from fleet.experts import ModelShape
from fleet.layout import AttentionLayout, Layout, head_groups
from fleet.layout_times import LayoutTimes
from fleet.placement import PlacementRecord, as_stated
from fleet.timing import EngineSpeed, RearrangeSpeed

UNSHARDABLE = "its agent does not turn layers over"
"""Why no layer of an engine can become sharded, unless its agent states otherwise."""
FIXED_ATTENTION = "its agent does not change its attention"
"""Why an engine cannot change its attention, unless its agent states otherwise."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Reporting capabilities of an engine. An engine declares a missing capability, and readers work without
    the data.
    """

    kv_events: bool = True
    load: bool = True
    experts: bool = True
    token_ids: bool = True
    """accepts token-id prompts and returns the token ids of every chunk"""
    passes_fields: bool = False
    """forwards request fields that Roost does not read (sampling parameters, guided decoding) to the engine
    unchanged. False: requests that have such a field are refused
    """
    returns_ids: bool = False
    """takes the client's own body on the chat and completions routes, and returns the token ids of prompt and
    answer when asked (`return_token_ids`). With a tokenizer its prompts are hashed and priced by their ids
    """
    isolates_tenants: bool = False
    """accepts `cache_salt` and shares KV only among requests with the same salt. False, also for older
    engines: all tenants share the engine's KV cache
    """
    token_frames: bool = False
    """sends the tokens of all streams of a router in one frame per step (`fleet.completions.token_frames`).
    False, also for older engines: each stream has its own events
    """


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of several names under which an engine serves: an alias, or an adapter on the same base model."""

    name: str
    max_context: int
    """context length in tokens, prompt and completion together"""
    adapter: bool = False
    """it is a LoRA adapter: its KV blocks are hashed under its name (`fleet.blocks.salted_seed`)"""


class EngineJoined(Event, frozen=True, kw_only=True):
    """An engine started serving. Stored. Also the answer to `DescribeEngine`."""

    engine: str
    worker_id: int
    engine_kind: str = ""
    """an `EngineKind` of `fleet.facts.engine_kinds`, if this version knows it; empty: an older engine"""
    model: str
    """base model, if the engine serves several models"""
    models: tuple[ServedModel, ...] = ()
    """all served models, including the base model; empty: the base model only. Ranks, load and limits are
    common to all
    """
    node: str
    urls: tuple[str, ...]
    """base URL of each target's HTTP server, index = rank; one URL for an engine that is a single target"""
    rank_header: str = ""
    """HTTP header that names the rank to a server that all ranks share; empty: each rank has its own URL"""
    nodes: tuple[str, ...] = ()
    """machine of each rank that holds experts (`expert_ranks`), index = rank; empty: all ranks are on `node`
    """
    block_size: int
    kv_blocks: int
    """KV blocks per rank, under data-parallel attention (`target_kv_blocks`)"""
    kv_block_bytes: int = 0
    """bytes of one KV block over all layers; 0: not reported"""
    max_context: int
    """context length in tokens, prompt and completion together"""
    max_batch_tokens: int
    """tokens that one rank computes in one step at most"""
    max_requests: int | None = None
    """concurrent requests per rank at most; None: the router's own limit"""
    attention: AttentionLayout | None = msgspec.field(default=None, name="layout")
    """that of `placement`; None: the engine reports no experts"""
    shape: ModelShape | None = None
    """shape of the MoE layers; None: the engine reports no experts"""
    placement: PlacementRecord | None = None
    tokenizer: str | None = None
    """sha256 (hex) of the tokenizer archive in the blob store (`bus.put_blob`); None: unknown"""
    weights_digest: str | None = None
    """identity of weights, dtype and quantisation, as text. A broken stream is resumed only on an engine with
    an equal digest. None: not reported; such engines count as equal to each other
    """
    speed: EngineSpeed | None = None
    """of a rank under data-parallel attention, or under the attention of an engine that cannot change it;
    None: not stated
    """
    unshardable: str = UNSHARDABLE
    """why no layer of the engine can become sharded; empty: layers can be turned over
    """
    tp_refusal: str = FIXED_ATTENTION
    """why the engine cannot change between data-parallel and tensor-parallel attention; empty: it can, while
    all layers are sharded
    """
    dispatch: str = "split"
    """replica selection of the engine, a `fleet.dispatch.DispatchRule`"""
    rearranges: bool = False
    """the engine moves its experts itself (vLLM's EPLB): it takes whole placements without empty slots, its
    replicas share evenly, and a plan is one handover
    """
    rearrange_speed: RearrangeSpeed | None = None
    """time that such a move takes; None: not stated, and the defaults hold until moves are measured"""
    gathers_all: bool = False
    """every rank that holds experts receives every token, so that the location of experts costs no request
    anything
    """
    capabilities: Capabilities = Capabilities()
    tp_speed: EngineSpeed | None = None
    """of all ranks together under tensor-parallel attention. `expert_read` is of a rank's part of an expert,
    and what ranks send one another is part of the steps. None: not measured, and `speed` stands in for it
    """
    layout_times: tuple[LayoutTimes, ...] = ()
    """steps of the engine in each layout that it can change to, as measured at its start; empty: not measured
    """
    hardware: str = ""
    """identity of the machine on which they were measured: times of another are not comparable; empty: not
    stated
    """
    protocol: int = 0
    """`fleet.event.PROTOCOL` of the agent; 0: older. Readers ignore joins that they do not understand"""

    @property
    def served(self) -> PlacementRecord | None:
        """`placement` with the attention of the event (`fleet.placement.as_stated`)."""
        if self.placement is None or self.attention is None:
            return self.placement
        return as_stated(self.placement, self.attention)

    @property
    def layout(self) -> Layout | None:
        """Layout of the epoch that it joined with; None: the engine reports no experts."""
        return Layout.of(self.attention, () if self.placement is None else self.placement.sharded)

    def target_speed(self, layout: Layout | None) -> EngineSpeed | None:
        """Return the speed of a target in a layout; None: not stated."""
        tensor_parallel = layout is not None and layout.attention == "tp"
        return self.tp_speed if tensor_parallel and self.tp_speed is not None else self.speed

    def shared_ranks(self, layout: Layout | None) -> int:
        """Return the number of ranks that compute every request of a target together, and whose limits add
        up: all of an engine that states them by rank and has tensor-parallel attention; otherwise 1.
        """
        return 1 if layout is None or layout.targets_are_ranks else len(self.urls)

    def target_kv_blocks(self, layout: Layout | None) -> int:
        """Return the KV blocks of a target in a layout; 0: unknown."""
        ranks = self.shared_ranks(layout)
        if ranks == 1 or self.shape is None:
            return self.kv_blocks
        return self.kv_blocks * head_groups(ranks, self.shape.kv_heads)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold experts. The targets of requests are `urls`: as many, unless
        tensor-parallel attention makes several ranks one target. Without a placement, that of the targets.
        """
        return len(self.urls) if self.placement is None else self.placement.ranks


class EngineLeft(Event, frozen=True, kw_only=True):
    """An engine stopped serving, on purpose or because it failed, and said so. Stored."""

    engine: str
    worker_id: int
    reason: str


class EngineHeartbeat(Event, frozen=True, kw_only=True):
    """Heartbeat of an engine, sent by rank 0 once a second. An engine is dead after three seconds without
    one. Not stored.
    """

    engine: str
    worker_id: int
    epoch: int
    """placement epoch in service"""
    handover_seconds: float = 0.0
    """expected extra latency, from a migration or layout switch in progress, of a request that arrives now;
    0: none in progress
    """


class RankDrained(Event, frozen=True, kw_only=True):
    """An operator drained a rank (`draining` True) or resumed routing to it. Running requests continue.
    Stored.

    It applies to one incarnation: a restarted engine receives requests again.
    """

    engine: str
    worker_id: int
    rank: int | None
    """rank; None: the whole engine"""
    draining: bool
    reason: str = ""


class ConfigChanged(Event, frozen=True, kw_only=True):
    """A part applied new settings while running, or refused them: the audit record of every reload.
    Stored."""

    part: str
    instance: int
    """identity of the process"""
    changed: dict[str, tuple[str, str]]
    """by key: the value before and after, as TOML literals; empty: no difference, or refused"""
    refused: str | None = None
    """reason for refusing the new settings; None: they are in use"""
