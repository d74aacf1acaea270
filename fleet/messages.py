"""All messages of the bus: the closed union, and which of them are stored."""

from fleet.facts.activity import (
    CountsImported,
    DispatchMeasured,
    ExpertsActivated,
    RequestsFinished,
    RequestsProfiled,
    TokensSampled,
)
from fleet.facts.bookings import ReservationsChanged
from fleet.facts.demand import (
    ClustersPublished,
    DemandPublished,
    PopularityShifted,
    ProfilePublished,
    TablesPublished,
    TrackerHeartbeat,
)
from fleet.facts.engines import ConfigChanged, EngineHeartbeat, EngineJoined, EngineLeft, RankDrained
from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.requests.control_loop import DescribeLoop, LoopDescribed, SetLoopState
from fleet.requests.demand import (
    DescribeClusters,
    DescribePopularity,
    DescribeProfile,
    DescribeTables,
    PopularityDescribed,
)
from fleet.requests.engines import (
    DescribeEngine,
    DescribeMemory,
    KvSnapshot,
    KvSnapshotRequested,
    MemoryDescribed,
)
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    EndLease,
    ExpertsLeased,
    HandoverDescribed,
    LeaseEnded,
    LeaseExperts,
    ProposeHandover,
)
from fleet.requests.layouts import DescribeLayouts, LayoutsDescribed, SetLayoutChoice
from fleet.requests.plans import (
    ApplyMap,
    ApplyPlan,
    DescribePlan,
    MigrateExpert,
    MigrationAccepted,
    PlanDescribed,
    RollBack,
    SetLayout,
)
from fleet.requests.refusal import RequestRefused
from fleet.requests.routing import (
    DecisionDescribed,
    DescribeDecision,
    DescribeReservations,
    ReservationsDescribed,
    RouteDecided,
    RouteReleased,
    RouteRequested,
)

AnyEvent = (
    EngineJoined
    | EngineLeft
    | EngineHeartbeat
    | ExpertsActivated
    | DispatchMeasured
    | CountsImported
    | RequestsProfiled
    | TokensSampled
    | RequestsFinished
    | ClustersPublished
    | TablesPublished
    | PopularityShifted
    | TrackerHeartbeat
    | PopularityDescribed
    | ProfilePublished
    | DemandPublished
    | PlacementCommitted
    | HomesPublished
    | DescribePlan
    | PlanDescribed
    | ProposeHandover
    | CommitHandover
    | AbortHandover
    | DescribeHandover
    | HandoverDescribed
    | LeaseExperts
    | ExpertsLeased
    | EndLease
    | LeaseEnded
    | MigrateExpert
    | ApplyMap
    | ApplyPlan
    | RollBack
    | SetLayout
    | MigrationAccepted
    | MigrationPlanned
    | MigrationStaged
    | MigrationCommitted
    | MigrationAborted
    | PlanEvaluated
    | SetLoopState
    | DescribeLoop
    | LoopDescribed
    | DescribeLayouts
    | SetLayoutChoice
    | LayoutsDescribed
    | DescribeEngine
    | DescribeProfile
    | DescribeClusters
    | DescribeTables
    | DescribePopularity
    | RankDrained
    | ConfigChanged
    | ReservationsChanged
    | DescribeReservations
    | ReservationsDescribed
    | RouteRequested
    | RouteDecided
    | RouteReleased
    | DescribeDecision
    | DecisionDescribed
    | KvSnapshotRequested
    | KvSnapshot
    | DescribeMemory
    | MemoryDescribed
    | RequestRefused
)
"""Closed union of all messages. The codec counts and drops unknown tags."""


STORED = (
    EngineJoined,
    EngineLeft,
    PlacementCommitted,
    MigrationPlanned,
    MigrationStaged,
    MigrationCommitted,
    MigrationAborted,
    PlanEvaluated,
    RankDrained,
    ConfigChanged,
)
"""Kinds that JetStream keeps and replays. All others are telemetry, recovered from snapshots."""
