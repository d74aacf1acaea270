"""The fleet as one router process sees it, as `GET /v1/status` returns it."""

import msgspec


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One target of requests. Load: what is booked and reported, at this router's best knowledge."""

    rank: int
    url: str
    state: str
    """"live", or why the rank gets no requests"""
    requests: int = 0
    """running or waiting"""
    prefill_tokens: int = 0
    """prompt tokens that are not computed yet"""
    blocks: int = 0
    """KV blocks that the requests hold"""


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of an engine. `worker_id` is a u64 and therefore text."""

    engine: str
    worker_id: str
    kind: str
    """an `EngineKind` of `fleet.facts.engine_kinds`; empty: an older engine"""
    models: list[str]
    node: str
    state: str
    """"live", or why the engine gets no requests"""
    epoch: int | None
    """of the last placement that this router knows; None: the engine reports no experts"""
    layout: str | None
    handover_seconds: float
    """latency that a handover in progress is expected to add; 0: none is in progress"""
    kv_blocks: int
    """of each target; 0: unknown"""
    ranks: list[TargetRecord]


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of the fleet at one router."""

    router: str
    """tag with which the ids of its decisions begin"""
    ready: bool
    missing: list[str]
    """conditions that readiness still waits for"""
    bus_silent: bool
    """the bus delivers nothing at present"""
    models: list[str]
    """served by a live engine"""
    waiting: int
    """requests that wait for a place at this router"""
    engines: list[EngineRecord]
    """by name"""
