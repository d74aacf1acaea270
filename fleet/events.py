"""Messages of the bus: a closed, tagged union of events and requests, and the two payloads in Dynamo's own
format.

Every `worker_id` is a random u64 per incarnation of an engine. `rank` is Dynamo's `dp_rank`. The envelope
(`bus.protocol.codec`) carries sequence number, publisher and time. Readers ignore fields that they do not
know.
"""

from typing import Any, Literal

import msgspec

from fleet.experts import ModelShape
from fleet.layout import Layout
from fleet.placement import PlacementRecord
from fleet.popularity import ExpertCounts, ExpertTable
from fleet.signatures import ClusterRecord
from fleet.timing import EngineSpeed


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the tagged union; the tag is the class name."""


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
    isolates_tenants: bool = False
    """accepts `cache_salt` and shares KV only among requests with the same salt. False, also for older
    engines: all tenants share the engine's KV cache
    """


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of several names under which an engine serves: an alias, or an adapter on the same base model."""

    name: str
    max_context: int
    """context length in tokens, prompt and completion together"""


class EngineJoined(Event, frozen=True, kw_only=True):
    """An engine started serving. Stored. Also the answer to `DescribeEngine`."""

    engine: str
    worker_id: int
    model: str
    """base model, if the engine serves several models"""
    models: tuple[ServedModel, ...] = ()
    """all served models, including the base model; empty: the base model only. Ranks, load and limits are
    common to all
    """
    node: str
    urls: tuple[str, ...]
    """base URL of each rank's HTTP server, index = rank; one URL for an engine that is a single target"""
    nodes: tuple[str, ...] = ()
    """machine of each rank, index = rank; empty: all ranks are on `node`"""
    block_size: int
    kv_blocks: int
    """KV blocks per rank"""
    kv_block_bytes: int = 0
    """bytes of one KV block over all layers; 0: not reported"""
    max_context: int
    """context length in tokens, prompt and completion together"""
    max_batch_tokens: int
    """tokens that one rank computes in one step at most"""
    max_requests: int | None = None
    """concurrent requests per rank at most; None: the router's own limit"""
    layout: Layout | None = None
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
    dispatch: str = "split"
    """replica selection of the engine, one of `fleet.dispatch.DISPATCHES`"""
    capabilities: Capabilities = Capabilities()


class EngineLeft(Event, frozen=True, kw_only=True):
    """An engine stopped serving on purpose. Stored."""

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


class ExpertsActivated(Event, frozen=True, kw_only=True):
    """Expert activations of one rank's requests in an interval. Not stored.

    `counts` are (token, k) pairs of the tokens of this rank's requests (demand), on whichever rank their
    experts are. Tokens served from the prefix cache activate nothing. They are reported in `cached_tokens`,
    not as zeros.
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
    counts: ExpertCounts


class DispatchMeasured(Event, frozen=True, kw_only=True):
    """Measured dispatch of one rank's tokens in an interval, and the load that the rank served. Not stored.
    Nothing is sent for an interval without a step.

    Tuples are [layers], sums over the interval. Sharded layers have zeros.
    """

    engine: str
    worker_id: int
    rank: int
    model: str
    epoch: int
    """placement epoch in service for the whole interval"""
    seconds: float
    """length of the interval"""
    steps: int
    """engine steps in which any rank had a token"""
    step_seconds: float
    """total duration of these steps"""
    tokens: int
    """computed tokens of this rank's requests"""
    pairs: int
    """(token, k) pairs of these tokens in one layer"""
    remote_ranks: tuple[float, ...]
    """distinct other ranks that these tokens were sent to, summed over the tokens"""
    local: tuple[float, ...]
    """pairs among `pairs` that this rank served itself"""
    served: tuple[float, ...]
    """pairs that this rank served, of the requests of any rank"""
    balance: tuple[float, ...]
    """sum over the steps of mean / highest load of a rank in pairs ("balancedness"); 1 for a step without
    pairs. Equal in the reports of all ranks
    """
    communication_seconds: float | None = None
    """part of `step_seconds` that this rank spent sending to other ranks and waiting for them; None: the
    engine cannot measure it
    """


class CountsImported(Event, frozen=True, kw_only=True):
    """Activation counts from another system (a recorder's dump, a load matrix, expert routings in responses),
    added to a model's profile once. Not stored.
    """

    model: str
    digest: str
    """identity of the imported data; a repeated import is ignored"""
    tokens: int
    counts: ExpertCounts


class SampledProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Activation counts of a whole request, prompt and completion separately. The tracker learns clusters
    from these. Only some requests carry a sample.
    """

    prompt: ExpertCounts
    """computed prompt tokens; tokens reused from the prefix cache activate nothing"""
    completion: ExpertCounts


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Activations of one request, as a signature over the clusters of `RequestsProfiled.clusters`."""

    decision: str
    """id of the routing decision that sent the request to this rank; empty: none given"""
    tokens: int
    """computed tokens, prompt and completion"""
    cached_tokens: int
    signature: bytes
    """signature of the computed tokens, packed by `fleet.signatures.pack`"""
    local: float | None = None
    """share of the computed (token, k) pairs that this rank served itself; None: nothing was computed"""
    parent: int | None = None
    """sequence hash of the block before the first of `blocks`; None: `blocks` start at the beginning of the
    prompt
    """
    blocks: bytes = b""
    """u64 little endian [n]: sequence hashes of consecutive full blocks, all computed on this rank"""
    block_signatures: bytes = b""
    """[n] packed signatures of the blocks, each from the block's own tokens only"""
    block_size: int = 0
    sample: SampledProfile | None = None


class RequestsProfiled(Event, frozen=True, kw_only=True):
    """Requests that finished on a rank, from any client. Not stored. Requests without a cluster model are not
    reported.
    """

    engine: str
    worker_id: int
    rank: int
    model: str
    epoch: int
    """placement epoch to which `local` refers"""
    clusters: int
    """version of the cluster model of the signatures; 0: none yet, and only the samples are usable"""
    requests: tuple[RequestProfile, ...]


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Features and predictions that a router had when it chose a rank. Keys are hashes: no names are sent."""

    decision: str
    worker_id: int
    rank: int
    prefix: int
    """sequence hash of the last block of the longest known prefix; 0: none"""
    tokens: bytes
    """u32 little endian: prompt token ids that were looked up in the token table"""
    session: int
    tenant: int
    predicted: bytes
    """predicted signature, packed"""
    predicted_local: float | None
    """predicted share of pairs that the chosen rank would serve itself; None: all ranks are equally near (TP)
    """
    prior_local: float | None
    """the same share predicted from the traffic mix alone, without features of the request"""
    spread: float | None = None
    """locality advantage of the best rank over the mean of its engine's ranks. The advantage of a rank is its
    predicted local share minus its local share under the traffic mix. None: not reported, or no prediction
    was made
    """


class RequestsFinished(Event, frozen=True, kw_only=True):
    """Requests that a router observed until they finished. The tracker learns from them. Not stored."""

    model: str
    tables: int
    """version of the tables used for the prediction"""
    clusters: int
    requests: tuple[RequestOutcome, ...]


class ClustersPublished(Event, frozen=True, kw_only=True):
    """The tracker's cluster model for a model. Not stored; `DescribeClusters` requests it."""

    model: str
    record: ClusterRecord


class DescribeClusters(Event, frozen=True, kw_only=True):
    """Request to the tracker for the `ClustersPublished` of a model. `RequestRefused` if there is none
    yet."""

    model: str


class KeyedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a table: `keys` u64 little endian [n], `rows` [n, fleet.prediction.ROW] bytes. A later row
    replaces an earlier row of the same key. A row with zero tokens of evidence deletes its key.
    """

    keys: bytes = b""
    rows: bytes = b""


class TablesPublished(Event, frozen=True, kw_only=True):
    """Prediction tables of a model: a snapshot, or a delta to version `base`. Not stored; `DescribeTables`
    requests a snapshot.
    """

    model: str
    version: int
    base: int | None = None
    """version to which this is a delta; None: a snapshot. A reader at another version requests a snapshot. So
    does every reader of a delta to itself (base = version): it announces a snapshot too large to publish
    """
    clusters: int
    """version of the cluster model"""
    shares: bytes
    """float32 [clusters]: current traffic mix"""
    trust: dict[str, float]
    """weight per source, independent of which sources have evidence"""
    trusts: bytes = b""
    """float32 little endian [fleet.prediction.PATTERNS, sources]: weight of each source, by the set of
    sources with evidence. More accurate than `trust`. Empty: use `trust` for every set
    """
    reliability: dict[str, float]
    """by source: accuracy in [0, 1]; 0 is as good as the traffic mix, 1 as good as the observed activations
    """
    gain: float
    """in [0, 1]: current calibration factor of the predicted gain of expert locality, over all requests"""
    gains: bytes = b""
    """float32 little endian [clusters], in [0, 1]: the calibration factor per cluster. A request's factor is
    the mean weighted by its cluster weights. Empty: `gain` for all
    """
    buckets: int
    """rows of the token table; a token's row is its id modulo this"""
    token_rows: bytes = b""
    """u32 little endian [n]: row numbers of the token table in this message"""
    token_ratios: bytes = b""
    """float16 little endian [n, clusters]"""
    blocks: KeyedRows = KeyedRows()
    sessions: KeyedRows = KeyedRows()
    tenants: KeyedRows = KeyedRows()


class DescribeTables(Event, frozen=True, kw_only=True):
    """Request to the tracker for the snapshot `TablesPublished` of a model. `RequestRefused` if there is none
    yet.
    """

    model: str


class PopularityShifted(Event, frozen=True, kw_only=True):
    """Expert popularity changed by more than sampling noise (`settled` False), or returned to normal
    (`settled` True). Not stored.
    """

    model: str
    version: int
    settled: bool
    divergence: float
    """Jensen-Shannon divergence of the fast profile from the slow profile, in nats, mean over layers"""
    threshold: float
    """divergence that sampling noise alone would rarely exceed"""
    layers: tuple[int, ...]
    """layers that changed, largest change first"""
    traceparent: str = ""
    """W3C trace context of this shift's span; the reaction to the shift continues the trace"""


class ProfilePublished(Event, frozen=True, kw_only=True):
    """The tracker's global profile of a model: expert probabilities per layer. Not stored; `DescribeProfile`
    requests it.
    """

    model: str
    version: int
    tokens: float
    """decayed exposure behind the profile"""
    profile: ExpertTable


class DemandPublished(Event, frozen=True, kw_only=True):
    """Tokens per second that one rank's requests send to each expert (fast time constant). Not stored."""

    engine: str
    worker_id: int
    rank: int
    model: str
    version: int
    tokens_per_second: float
    demand: ExpertTable
    """(token, k) pairs per second"""
    pairs: float = 0.0
    """decayed (token, k) pairs behind each layer of `demand`, mean over layers: the amount of evidence; 0: no
    demand, or not reported
    """
    remote: float | None = None
    """share of the demand for experts without a replica on this rank; None: placement unknown, or no demand
    """


class PlacementCommitted(Event, frozen=True, kw_only=True):
    """An engine committed a placement and serves it from now on. Stored."""

    engine: str
    worker_id: int
    layout: Layout
    placement: PlacementRecord
    plan: str | None = None


class HomesPublished(Event, frozen=True, kw_only=True):
    """Home ranks of an engine's clusters: the share of each cluster's traffic that each rank should serve.
    Not stored. The planner publishes homes when they change, and repeats them every cycle for late
    subscribers.
    """

    engine: str
    worker_id: int
    model: str
    version: int
    """increases with every change, also across restarts of the planner"""
    epoch: int
    """placement epoch for which the homes were computed"""
    clusters: int
    """version of the cluster model to which the clusters belong"""
    count: int
    """K, the number of clusters in that model"""
    ranks: int
    homes: bytes
    """float32 little endian [K, ranks]: shares that sum to 1 per cluster; a row of zeros: no preference.
    Empty: no cluster has a home. The homes are valid from `epoch` on. A reader at an older epoch keeps its
    previous homes until it reaches `epoch`
    """
    reason: str = ""
    """explanation in one sentence: why these homes, or why none"""


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


class ExpertCopy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Copy of an expert's weights from one slot to another. Slots are numbered over all ranks, as in
    `Placement`.
    """

    layer: int
    expert: int
    source: int
    """slot to read from, in the epoch in service"""
    slot: int
    """slot that serves the expert from the next epoch on"""


class ExpertArrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Weights that a handover copied to a rank: [layer, expert, source rank, destination rank]."""

    layer: int
    expert: int
    source: int
    rank: int


class ProposeHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: prepare (stage) the next epoch (`fleet.handover`). The rank answers immediately
    with `HandoverDescribed`. It publishes the end of staging, and reports it in the answer to a repeated
    proposal.
    """

    engine: str
    worker_id: int
    rank: int
    token: int
    """fencing token of the coordinator's lease"""
    handover: int
    """number of the handover; increases monotonically"""
    plan: str
    placement: PlacementRecord
    """placement of the next epoch"""
    copies: tuple[ExpertCopy, ...] = ()
    """copies of all ranks: each rank finds its own reads and the reads of others from it"""
    deadline_seconds: float
    """time limit for staging, counted from the rank's receipt of the proposal"""
    traceparent: str = ""
    """W3C trace context of the handover's span"""


class CommitHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: serve the new epoch as soon as every rank is ready. Sent only after the decision
    is durable.
    """

    worker_id: int
    rank: int
    token: int
    handover: int


class AbortHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: abort the handover and drop staged weights."""

    worker_id: int
    rank: int
    token: int
    handover: int
    reason: str


class DescribeHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: report the state of your handover."""

    worker_id: int
    rank: int
    token: int = 0
    """fencing token of the requesting coordinator: the rank rejects lower tokens from then on; 0: read-only
    request
    """


class PullTold(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data that one rank read from another in a handover."""

    source: int
    """rank read from"""
    transfer: str
    """transfer method: nixl, shared, local"""
    experts: int
    bytes: int
    seconds: float
    """duration of the reads, without checksum verification"""


class HandoverDescribed(Event, frozen=True, kw_only=True):
    """Handover state of one rank. Answer to every handover command, and published at every change. Not
    stored.
    """

    worker_id: int
    rank: int
    state: str
    """one of `fleet.handover.RankState`"""
    served: int
    """epoch in service"""
    token: int
    """highest fencing token seen"""
    handover: int
    """number of the open handover; 0: none"""
    concluded: int
    """highest number of a finished handover"""
    flipped: int
    """number of the last handover that was flipped to"""
    verdict: str = ""
    """`fleet.handover.Verdict` on the command that this answers; empty: not an answer to a command"""
    failure: str = ""
    """reason why staging failed, with cause and remedy"""
    fault: str = ""
    """the same as a short code, for metrics"""
    seconds: float = 0.0
    """time since the open handover was proposed, or duration of the last one"""
    pulls: tuple[PullTold, ...] = ()
    free: int = 0
    """cells available for incoming experts"""
    quarantined: int = 0
    """cells in which late bytes may still arrive"""
    draining: int = 0
    """cells that other ranks may still read"""
    oldest_seconds: float = 0.0
    """age of the oldest quarantined or draining cell"""


class MemoryAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Address at which another rank can read a rank's expert memory. Readers validate every number before use
    as an address.
    """

    cells: int
    cell_bytes: int
    layout: str
    """hash of the cell format: tensor names, dtypes, shapes and offsets"""
    base: int
    """virtual address in the process"""
    device: int = 0
    kind: str = "DRAM"
    """NIXL's name of the memory type"""
    agent: str = ""
    """NIXL agent name with its incarnation; empty: no NIXL"""
    metadata: bytes = b""
    """NIXL metadata of that agent"""
    host: str = ""
    """identity of machine and process namespace; processes with equal values can share memory"""
    pid: int = 0
    descriptor: int = -1
    """file descriptor of the memory in that process; -1: not shareable"""
    inode: int = 0
    """inode of that file, to detect a reused descriptor"""


class LeaseExperts(Event, frozen=True, kw_only=True):
    """Request between ranks of one engine: grant a read lease on these experts. The owner does not change
    them during the lease. A repetition renews the lease.
    """

    worker_id: int
    rank: int
    """owner, the receiver of the request"""
    reader: int
    """reader, the sender of the request"""
    handover: int
    experts: tuple[tuple[int, int, int], ...]
    """(layer, slot over all ranks, expert)"""
    seconds: float
    """duration of the lease without renewal"""


class ExpertsLeased(Event, frozen=True, kw_only=True):
    """Answer to `LeaseExperts`."""

    worker_id: int
    rank: int
    lease: int
    memory: MemoryAddress
    cells: tuple[int, ...]
    """cell of each expert"""
    checksums: tuple[tuple[int, ...], ...]
    """u64 per tensor of each expert, as loaded or verified, not computed from the present memory"""


class EndLease(Event, frozen=True, kw_only=True):
    """Request: release a lease after the last read. Answered with `LeaseEnded`, also for unknown leases."""

    worker_id: int
    rank: int
    lease: int


class LeaseEnded(Event, frozen=True, kw_only=True):
    """Answer to `EndLease`."""

    worker_id: int
    rank: int
    lease: int


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


class ApplyPlan(Event, frozen=True, kw_only=True):
    """Request to the migration service: execute this plan. Answered with `MigrationAccepted`."""

    engine: str
    plan: bytes
    """JSON: `migration.model.plan.Plan`"""


class RollBack(Event, frozen=True, kw_only=True):
    """Request to the migration service: restore an engine's placement before a plan. Answered with
    `MigrationAccepted`.
    """

    engine: str
    plan: str = ""
    """plan id; empty: the last plan with a committed handover"""


class MigrationAccepted(Event, frozen=True, kw_only=True):
    """Answer: the plan will be executed. `MigrationPlanned` and later events report its progress."""

    engine: str
    worker_id: int
    plan: str
    handovers: int
    copies: int
    bytes: int
    what: tuple[str, ...] = ()
    """first steps of the plan, as text"""


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
    pulls: tuple[PullTold, ...] = ()
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


class PlanJudged(Event, frozen=True, kw_only=True):
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
    was measured, or experts were moved by others in the meantime
    """
    predicted_before: LoopFigures
    predicted_after: LoopFigures
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None
    realised: float | None = None
    """measured gain in step seconds, as a share of the predicted gain; below 0: slower than before. None: not
    measured
    """
    trust: float
    """discount on predicted gains from now on, in (0, 1]"""
    reason: str
    """explanation in one sentence"""


class SteerLoop(Event, frozen=True, kw_only=True):
    """Request to the migration service: plan automatically, or (paused) only on request. The setting survives
    restarts of the service. Answered with `LoopDescribed`.
    """

    paused: bool
    reason: str = ""
    """reason, for later readers"""


class DescribeLoop(Event, frozen=True, kw_only=True):
    """Request to the migration service: describe the state of the automatic control loop. Answered with
    `LoopDescribed`.
    """


class LayerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures per layer, [layers] each, measured in the last window."""

    balance: tuple[float, ...]
    remote_ranks: tuple[float, ...]
    local: tuple[float, ...]


class PlanTold(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a plan, for display."""

    plan: str
    origin: Origin
    policy: str
    at: float
    """start time, Unix seconds"""
    outcome: str
    """under way, committed, aborted (with the reason), kept, harmful, ..."""
    copies: int
    bytes: int
    predicted_before: LoopFigures | None = None
    predicted_after: LoopFigures | None = None
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None


class EngineLoop(msgspec.Struct, frozen=True, kw_only=True):
    """State of the automatic control loop for one engine."""

    engine: str
    worker_id: int
    epoch: int
    measured: LoopFigures | None = None
    """figures of the last window; None: nothing was measured"""
    layers: LayerFigures | None = None
    at_start: LoopFigures | None = None
    """first measured window of this incarnation of the engine"""
    decided_at: float | None = None
    """Unix seconds; None: no decision yet"""
    decided: str = ""
    """last decision, in one sentence: a plan, or why there is none"""
    next_seconds: float | None = None
    """time until the next planning cycle; None: only on request"""
    trust: float = 1.0
    """discount on predicted gains, in (0, 1]"""
    spent_bytes: int = 0
    """bytes copied by the planner's own plans in the present budget interval"""
    moved_bytes: int = 0
    """bytes copied since the service first saw the engine"""
    homes: int = 0
    """clusters that have a home"""
    homes_note: str = ""
    resting: int = 0
    """experts in cooldown: recently moved, or part of a harmful plan"""
    plans: tuple[PlanTold, ...] = ()
    """last plans, newest first"""


class LoopDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeLoop` and `SteerLoop`."""

    policy: str
    automatic: bool
    """automatic planning, as configured"""
    paused: bool
    paused_reason: str = ""
    paused_at: float | None = None
    """Unix seconds"""
    budget_bytes: int
    budget_seconds: float
    cycle_seconds: float
    engines: tuple[EngineLoop, ...] = ()


class DescribeEngine(Event, frozen=True, kw_only=True):
    """Request to one engine for its `EngineJoined`."""

    worker_id: int


class DescribeProfile(Event, frozen=True, kw_only=True):
    """Request to the tracker for the `ProfilePublished` of a model: uniform, with 0 tokens, before the first
    report. `RequestRefused` for a model that no engine has named.
    """

    model: str


class DescribePopularity(Event, frozen=True, kw_only=True):
    """Request to the tracker for the `PopularityDescribed` of a model."""

    model: str


class RankPopularity(msgspec.Struct, frozen=True, kw_only=True):
    """Expert demand and placement of one rank. Experts as (layer, expert, tokens per second), most demand
    first.
    """

    engine: str
    rank: int
    tokens_per_second: float
    remote: float | None
    wanted_remote: tuple[tuple[int, int, float], ...] = ()
    """in demand on this rank, placed on another"""
    local_idle: tuple[tuple[int, int, float], ...] = ()
    """placed on this rank, lowest demand here"""


class ClusterPopularity(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster: its share of the traffic, and its distance from the mix (Jensen-Shannon, nats, mean over
    layers).
    """

    cluster: int
    share: float
    distance: float


class SourceQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Measured quality of one source of prediction."""

    source: str
    requests: int
    """outcomes for which it had evidence"""
    trust: float
    reliability: float


class PopularityDescribed(Event, frozen=True, kw_only=True):
    """Complete tracker state of a model, for display and for `roost popularity`."""

    model: str
    tokens: float
    """decayed exposure behind the slow profile"""
    tokens_per_second: float
    fast: ExpertTable
    """probabilities per layer over the last seconds"""
    slow: ExpertTable
    ranks: tuple[RankPopularity, ...]
    clusters: tuple[ClusterPopularity, ...]
    shifted: bool
    divergence: float | None
    """divergence of the fast from the slow profile, nats, mean over layers; None: too little data"""
    threshold: float | None
    sources: tuple[SourceQuality, ...]
    gain: float
    outcomes: int
    """requests whose prediction was compared with the measured activations"""
    recall: float | None
    """predicted mass of the true most popular half of a layer's experts / its whole mass, mean over sampled
    requests
    """
    prior_recall: float | None
    """the same for the traffic mix"""
    stored_blocks: int
    stored_bytes: int


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


class BookedLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load that one router booked on one rank for one request."""

    id: str
    """id of the decision"""
    worker_id: int
    rank: int
    prefill_tokens: int
    """prompt tokens still to compute; 0 after the first token"""
    blocks: int
    steps: int
    """tokens still expected"""
    age_seconds: float
    """time since the booking"""
    session: int = 0
    """hash of the conversation, which is now on this rank; 0: not given"""
    prefix: bytes = b""
    """u64 little endian [n]: sequence hashes of the prompt's first blocks, which this rank will have cached.
    Sent once, and only for ranks that do not report their KV cache
    """
    external: bool = False
    """another data plane sends the request"""
    held: bool = False
    """external, before its first token: counted in addition to the load that its rank reports"""


class ReservationsChanged(Event, frozen=True, kw_only=True):
    """Bookings that one router made, updated or released since its last message. Best effort, coalesced, not
    stored. Readers expire bookings. They drop all bookings of a router that stops sending or returns as
    another `router`.
    """

    router: int
    """random u64 per router process. A message without changes is the router's heartbeat"""
    booked: tuple[BookedLoad, ...] = ()
    """new and changed bookings"""
    ended: tuple[str, ...] = ()
    """decision ids of finished bookings"""
    forgotten: tuple[str, ...] = ()
    """decision ids booked by another router that shall end them (this router received their `RouteReleased`)
    """
    computed: tuple[str, ...] = ()
    """decision ids booked by another router, whose prompts are computed"""
    released_by: dict[str, str] = {}
    """by decision id, forgotten or computed: the tenant that released it. It ends only that tenant's own
    bookings. Ids not listed were released by a caller that may end any booking
    """


class DescribeReservations(Event, frozen=True, kw_only=True):
    """Request to one router for all its bookings."""

    router: int
    """router that requests"""


class ReservationsDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeReservations`: all bookings of one router, including message `sequence` of
    `publisher_id`.
    """

    router: int
    publisher_id: int
    sequence: int
    """last ReservationsChanged included; -1: none was sent yet"""
    booked: tuple[BookedLoad, ...]


class RouteRequested(Event, frozen=True, kw_only=True):
    """Request to one router: decide. For data planes that forward requests on their own. HTTP equivalent:
    `POST /v1/route[/reserve]`.
    """

    body: bytes
    """a chat or completions request as JSON"""
    request_id: str = ""
    session: str = ""
    tenant: str = ""
    priority: str = ""
    reserve: bool = False
    """book the load on the chosen rank until release or expiry"""
    wait: bool = False
    """with `reserve`: wait for a free place if every rank is saturated. The caller's request timeout must
    allow for the wait
    """
    without: tuple[str, ...] = ()
    """decide without these cost terms; only without `reserve`"""
    gone: tuple[str, ...] = ()
    """decide without these ranks ("engine/rank") or engines; only without `reserve`"""
    traceparent: str = ""
    """W3C trace context of the caller's span"""


class RouteDecided(Event, frozen=True, kw_only=True):
    """Answer to `RouteRequested`."""

    record: bytes
    """the decision as JSON, as returned by `GET /v1/decisions/{id}`"""
    url: str
    """base URL of the chosen rank"""
    expires_seconds: float | None = None
    """the reservation expires after this time; None: nothing was reserved"""
    cache_salt: str | None = None
    """`cache_salt` to send to that rank; None: send none"""


class RouteReleased(Event, frozen=True, kw_only=True):
    """Request to one router: a reserved request has computed its prompt (`first_token`) or has ended.
    Answered with the same event. An unknown or ended reservation is not an error.
    """

    id: str
    """id of the decision"""
    first_token: bool = False
    """True: the prompt is computed and the request continues; False: the request has ended"""


class DescribeDecision(Event, frozen=True, kw_only=True):
    """Request to the router that made a decision: return it. `RequestRefused` if it is not among the last
    decisions.
    """

    id: str
    tenant: str | None = None
    """return only decisions of this tenant and refuse others as unknown; None: of any tenant"""


class DecisionDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeDecision`."""

    record: bytes
    """JSON"""


class KvSnapshotRequested(Event, frozen=True, kw_only=True):
    """Request to one rank for a snapshot of its KV cache and the sequence number of its last kv-events
    message.
    """

    worker_id: int
    rank: int
    after: int | None = None
    """a recent snapshot suffices if it includes the kv-events message of this number (-1: any); None: the
    present state
    """


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


class KvSnapshot(Event, frozen=True, kw_only=True):
    """Answer to `KvSnapshotRequested`: `events`, applied to an empty cache, give the state after message
    `sequence` of `publisher_id`.
    """

    worker_id: int
    rank: int
    publisher_id: int
    sequence: int
    """last kv-events message included; -1: none was sent yet"""
    events: tuple[KvEvent, ...]


class RequestRefused(Event, frozen=True, kw_only=True):
    """Answer to a request that cannot be fulfilled, with cause and remedy."""

    reason: str


AnyEvent = (
    EngineJoined
    | EngineLeft
    | EngineHeartbeat
    | ExpertsActivated
    | DispatchMeasured
    | CountsImported
    | RequestsProfiled
    | RequestsFinished
    | ClustersPublished
    | TablesPublished
    | PopularityShifted
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
    | ApplyPlan
    | RollBack
    | MigrationAccepted
    | MigrationPlanned
    | MigrationStaged
    | MigrationCommitted
    | MigrationAborted
    | PlanJudged
    | SteerLoop
    | DescribeLoop
    | LoopDescribed
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
    PlanJudged,
    RankDrained,
    ConfigChanged,
)
"""Kinds that JetStream keeps and replays. All others are telemetry, recovered from snapshots."""
