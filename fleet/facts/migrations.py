"""Facts about plans: planned, staged, committed, aborted, evaluated."""

from typing import Literal

import msgspec

from fleet.event import Event
from fleet.layout import AttentionKind
from fleet.placement import PlacementRecord


class ExpertArrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Weights that a handover copied to a rank: [layer, expert, source rank, destination rank]."""

    layer: int
    expert: int
    source: int
    rank: int


class PullReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data that one rank read from another in a handover."""

    source: int
    """rank read from"""
    transfer: str
    """transfer method: nixl, shared, local"""
    experts: int
    bytes: int
    seconds: float
    """duration of the reads, without checksum verification"""


Origin = Literal["operator", "planner", "rollback"]


class LoopFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Performance figures of an engine under a placement: predicted by the planner, or measured
    (`DispatchMeasured`).
    """

    remote_ranks: float
    """distinct other ranks to which a token is sent in a layer, mean"""
    local: float
    """share of (token, k) pairs served on the rank of their request"""
    balance: float
    """mean / highest load of a rank, mean over layers. Measured: computed per step, then averaged over steps
    """
    step_seconds: float
    """duration of one step"""
    tokens: float = 0.0
    """measured tokens; 0: predicted"""
    communication: float | None = None
    """share of a step that ranks spend sending to and waiting for each other, mean over ranks; None:
    predicted, or not measurable by the engine
    """


class MigrationPlanned(Event, frozen=True, kw_only=True):
    """Execution of a plan started. Stored."""

    engine: str
    worker_id: int
    plan: str
    origin: Origin
    base_epoch: int
    handovers: int
    copies: int
    bytes: int
    reason: str
    blob: str = ""
    """sha256 of the plan's JSON (`migration.model.plan.Plan`) in the blob store, kept until the plan ends;
    empty: the store had no room for it
    """
    traceparent: str = ""
    """W3C trace context of the plan's span"""
    before: LoopFigures | None = None
    """prediction without the plan; None: not computed"""
    after: LoopFigures | None = None
    """prediction with the plan"""
    policy: str = ""
    """planning policy that made it; empty: not made by the planner"""
    to_sharded: tuple[int, ...] = ()
    """MoE layers that the plan turns from whole to sharded"""
    to_whole: tuple[int, ...] = ()
    """MoE layers that the plan turns from sharded to whole"""
    attention: AttentionKind | None = None
    """attention after the plan; None: as before"""
    paced: bool = False
    """its handovers wait until the byte budget of automatic plans permits them, and count towards it"""


class MigrationStaged(Event, frozen=True, kw_only=True):
    """Every rank of an engine has staged and verified the next epoch, which is about to be committed.
    Stored."""

    engine: str
    worker_id: int
    plan: str
    handover: int
    number: int
    """index of the handover in the plan, from 0"""
    epoch: int
    """epoch that the handover creates"""
    placement: PlacementRecord
    copies: int
    bytes: int
    seconds: float
    """time since the proposal"""
    pulls: tuple[PullReport, ...] = ()
    """reads of all ranks"""
    arrivals: tuple[ExpertArrival, ...] = ()
    """every copy; empty if a successor finished the handover without having its plan"""


class MigrationCommitted(Event, frozen=True, kw_only=True):
    """One handover of a plan committed: every rank serves its epoch. Stored, after its
    `PlacementCommitted`."""

    engine: str
    worker_id: int
    plan: str
    handover: int
    number: int
    epoch: int
    copies: int
    bytes: int
    seconds: float
    """from the proposal to the flip of the last rank"""
    commit_seconds: float
    """part of `seconds` from the commit decision on"""
    last: bool
    """True for the last handover of the plan"""
    arrivals: tuple[ExpertArrival, ...] = ()
    """as in `MigrationStaged`"""


class MigrationAborted(Event, frozen=True, kw_only=True):
    """A handover was aborted, together with the rest of its plan. The previous epoch stays in service.
    Stored.
    """

    engine: str
    worker_id: int
    plan: str
    handover: int
    """0: none was started"""
    number: int
    epoch: int
    """epoch that was not reached"""
    reason: str
    """cause and remedy"""
    fault: str
    """the same as a short code"""
    rank: int | None = None
    """rank at fault"""
    seconds: float = 0.0


Verdict = Literal["kept", "harmful", "unknown"]


class PlanEvaluated(Event, frozen=True, kw_only=True):
    """Measured effect of one of the planner's own plans, some time after its end. Stored, after the plan's
    outcome.
    """

    engine: str
    worker_id: int
    plan: str
    epoch: int
    """epoch in which the plan was evaluated"""
    verdict: Verdict
    """kept: the plan stays; harmful: it is rolled back and its experts enter a cooldown; unknown: too little
    was measured, or experts were moved by others or layers changed their form in the meantime
    """
    predicted_before: LoopFigures
    predicted_after: LoopFigures
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None
    realised: float | None = None
    """measured gain in step seconds, as a share of the predicted gain; below 0: slower than before. None: not
    measured
    """
    plan_discount: float
    """factor on predicted gains from now on, in (0, 1]"""
    reason: str
    """explanation in one sentence"""
