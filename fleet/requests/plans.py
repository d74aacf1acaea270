"""Requests to the migration service: describe, execute or roll back a plan."""

import msgspec

from fleet.event import Event
from fleet.layout import AttentionKind
from fleet.placement import PlacementRecord


class DescribePlan(Event, frozen=True, kw_only=True):
    """Request to the planner for the `PlanDescribed` of an engine in its present state. Nothing is moved.
    `RequestRefused` for an engine with too little data to plan.
    """

    engine: str
    policy: str = ""
    """name of a planning policy; empty: the configured one"""
    budget_bytes: int | None = None
    """limit of copied bytes; None: as configured"""
    memory: bool = False
    """also report the value of each additional redundant slot per rank"""
    dead: tuple[int, ...] = ()
    """plan as if these ranks were lost"""
    layers: tuple[int, ...] = ()
    """change only these MoE layers; empty: all"""


class PlanDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribePlan`: a plan, or the reason why there is none."""

    engine: str
    worker_id: int
    record: bytes
    """JSON: `migration.model.plan_record.PlanRecord`"""
    plan: bytes = b""
    """JSON: `migration.model.plan.Plan`, for `ApplyPlan`; empty: no plan"""


class MigrateExpert(Event, frozen=True, kw_only=True):
    """Request to the migration service: copy an expert to a rank. Answered with `MigrationAccepted`."""

    engine: str
    layer: int
    expert: int
    rank: int
    """destination rank"""
    source: int | None = None
    """rank to read from; None: the nearest rank that has the expert"""
    move: bool = False
    """remove the expert from the source rank"""
    swap: int | None = None
    """expert of the layer to move in the opposite direction; None: chosen automatically if there is no free
    slot
    """
    dry_run: bool = False
    """answer with what would be done, and do nothing"""


class ApplyMap(Event, frozen=True, kw_only=True):
    """Request to the migration service: bring a whole map into force, on an engine that moves its experts
    itself. Answered with `MigrationAccepted`.
    """

    engine: str
    placement: PlacementRecord
    """every slot filled; its epoch does not count"""
    dry_run: bool = False
    """answer with what would be done, and do nothing"""


class ApplyPlan(Event, frozen=True, kw_only=True):
    """Request to the migration service: execute this plan. Answered with `MigrationAccepted`."""

    engine: str
    plan: bytes
    """JSON: `migration.model.plan.Plan`"""


class SetLayout(Event, frozen=True, kw_only=True):
    """Request to the migration service: turn layers over until exactly these are sharded, and change the
    attention. Answered with `MigrationAccepted`. Replaces a plan that waits for the byte budget; if the
    engine has this layout already, that plan only ends.
    """

    engine: str
    sharded: tuple[int, ...]
    """MoE layers to be sharded, ascending. The others become whole, with an even share of their experts on
    each rank
    """
    attention: AttentionKind = "dp"
    """tp needs all layers sharded. The attention changes in a handover of its own, while all layers are
    """
    now: bool = False
    """turn the layers over one after another without waiting for the byte budget"""
    dry_run: bool = False
    """answer with what would be done, and do nothing"""


class RollBack(Event, frozen=True, kw_only=True):
    """Request to the migration service: restore an engine's placement before a plan. Answered with
    `MigrationAccepted`. Replaces a plan that waits for the byte budget; if that one is to be undone and has
    changed nothing yet, it only ends.
    """

    engine: str
    plan: str = ""
    """plan id; empty: the last plan with a committed handover"""


class KvMove(msgspec.Struct, frozen=True, kw_only=True):
    """KV that ranks read from each other for a switch of attention: full pages ahead, while they serve, and
    in the step that switches the page that each request is filling.
    """

    pages: int
    """pages in use, those kept for reuse included, by the last load reports"""
    bytes: int
    """KV that ranks read from each other, if no page is on several of them"""
    rounds: int
    """rounds of announcements and reads, the last one in the step that switches"""
    seconds: float
    """time in which the rank that reads most does so, at the speed of links"""
    pause_seconds: float
    """expected time for which no step computes: the last round, and the bookkeeping of all pages"""


class SwitchEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a switch of layout."""

    bytes_by_link: dict[str, int]
    """bytes by path: local (within a rank), same-node, cross-node"""
    seconds: float
    """duration of the handovers at the speed of links"""
    budget_seconds: float | None
    """time until the byte budget permits the last handover, at least; None: it is 0, and permits nothing"""
    measured: bool
    """True if the speed was measured in the last handover; False: it is configured"""
    cells: int
    """most cells that a rank fills in one handover"""
    free: int
    """fewest free cells of any rank"""
    kv: KvMove | None = None
    """None: the attention does not change, or its engine does not report the pages in use or their size"""


class MigrationAccepted(Event, frozen=True, kw_only=True):
    """Answer: the plan will be executed. `MigrationPlanned` and later events report its progress."""

    engine: str
    worker_id: int
    plan: str
    handovers: int
    """0: nothing is carried out; the request ended this plan, which waited for the byte budget"""
    copies: int
    bytes: int
    what: tuple[str, ...] = ()
    """first steps of the plan, as text, after the plan that it replaces"""
    switch: SwitchEstimate | None = None
    """of a switch of layout"""
