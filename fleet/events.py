"""Everything said on the bus: a closed, tagged union of past-tense facts, and the two payloads in Dynamo's own form.

Every `worker_id` is a random u64 per incarnation of an engine; `rank` is Dynamo's `dp_rank`. Sequence numbers, publisher
and time travel in the envelope (`bus.protocol.codec`), not here. A field that a reader does not know is ignored.
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
    """What an engine can report. A missing capability is declared, and readers do without."""

    kv_events: bool = True
    load: bool = True
    experts: bool = True
    token_ids: bool = True
    """accepts token-id prompts and returns the ids of every chunk"""
    passes_fields: bool = False
    """serves fields of a request that Roost does not read (sampling parameters, guided decoding): they are sent as they came. False: a request
    that has one is refused"""
    isolates_tenants: bool = False
    """takes `cache_salt`, and shares KV only among requests of the same salt. False, also of older engines: tenants share its KV cache"""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of several names under which an engine serves: an alias, or an adapter on the same base model."""

    name: str
    max_context: int
    """tokens, prompt and completion together"""


class EngineJoined(Event, frozen=True, kw_only=True):
    """An engine serves from now on. Stored; also the answer to a `DescribeEngine` request."""

    engine: str
    worker_id: int
    model: str
    """its base model, where it serves several"""
    models: tuple[ServedModel, ...] = ()
    """all it serves, the base model included; empty: the base model alone. Its ranks, their load and limits are the same for all"""
    node: str
    urls: tuple[str, ...]
    """base URL of each rank's HTTP face, index = rank; one URL for an engine that is one target"""
    nodes: tuple[str, ...] = ()
    """machine of each rank, index = rank; empty: all are on `node`"""
    block_size: int
    kv_blocks: int
    """KV blocks per rank"""
    kv_block_bytes: int = 0
    """memory of one, with all layers; 0: the engine does not say"""
    max_context: int
    """tokens, prompt and completion together"""
    max_batch_tokens: int
    """tokens one rank computes in one step"""
    max_requests: int | None = None
    """requests that one rank is given at once; None: the router's own limit"""
    layout: Layout | None = None
    shape: ModelShape | None = None
    """None: the engine says nothing of experts"""
    placement: PlacementRecord | None = None
    tokenizer: str | None = None
    """sha256 (hex) of the tokenizer archive in the blob store (`bus.put_blob`); None: unknown"""
    weights_digest: str | None = None
    """identity of its weights, dtype and quantisation, as text: an answer that one engine began is continued only by engines of an equal one. None:
    the engine says nothing of it, and equals others that say nothing"""
    speed: EngineSpeed | None = None
    dispatch: str = "split"
    """how the engine chooses among replicas, one of `fleet.dispatch.DISPATCHES`"""
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
    handover_seconds: float = 0.0
    """what a migration or layout switch in progress is expected to cost a request that comes now; 0: none is under way"""


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
    counts: ExpertCounts


class DispatchMeasured(Event, frozen=True, kw_only=True):
    """Where the tokens of one rank really went in an interval, and what the rank really served. Not stored. Intervals without a step are silent.

    Tuples are [layers], sums over the interval; layers that are sharded have zeros.
    """

    engine: str
    worker_id: int
    rank: int
    model: str
    epoch: int
    """placement epoch that was served the whole interval"""
    seconds: float
    """length of the interval"""
    steps: int
    """of the engine, in which any rank had a token"""
    step_seconds: float
    """that these took, all together"""
    tokens: int
    """of this rank's requests, that were computed"""
    pairs: int
    """(token, k) pairs of these tokens in one layer"""
    remote_ranks: tuple[float, ...]
    """distinct other ranks that each of these tokens was sent to"""
    local: tuple[float, ...]
    """of these pairs: that this rank served itself"""
    served: tuple[float, ...]
    """pairs that this rank served, whoever's"""
    balance: tuple[float, ...]
    """sum over the steps of mean / highest load of a rank in pairs ("balancedness"); 1 for a step without any. Every rank says the same"""
    communication_seconds: float | None = None
    """of `step_seconds`: spent by this rank sending to other ranks and waiting for them; None: the engine cannot tell"""


class CountsImported(Event, frozen=True, kw_only=True):
    """Counts of another system (a recorder's dump, a load matrix, routings in responses), taken into a model's profile once. Not stored."""

    model: str
    digest: str
    """identity of what was imported: a second import of it changes nothing"""
    tokens: int
    counts: ExpertCounts


class SampledProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole request counted, prompt and completion apart: what the tracker learns clusters from. Only some requests carry one."""

    prompt: ExpertCounts
    """computed prompt tokens; reused ones activate nothing"""
    completion: ExpertCounts


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What one request activated, as a signature over the clusters of `RequestsProfiled.clusters`."""

    decision: str
    """id of the routing decision that brought it; empty when nobody said"""
    tokens: int
    """computed tokens, prompt and completion"""
    cached_tokens: int
    signature: bytes
    """`fleet.signatures.pack`; of the computed tokens"""
    local: float | None = None
    """share of the computed (token, k) pairs that this rank serves itself; None: nothing was computed"""
    parent: int | None = None
    """sequence hash of the block before the first of `blocks`; None: they begin the prompt"""
    blocks: bytes = b""
    """u64 little endian [n]: sequence hashes of consecutive full blocks, all computed here"""
    block_signatures: bytes = b""
    """[n] packed signatures of the blocks, each of its own tokens alone"""
    block_size: int = 0
    sample: SampledProfile | None = None


class RequestsProfiled(Event, frozen=True, kw_only=True):
    """Requests that a rank finished, whoever asked for them. Not stored. Requests without a cluster model are not reported."""

    engine: str
    worker_id: int
    rank: int
    model: str
    epoch: int
    """placement epoch that `local` is about"""
    clusters: int
    """version of the cluster model the signatures are over; 0: none yet, and only samples are of use"""
    requests: tuple[RequestProfile, ...]


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a router knew of a request when it chose, and what it expected. Keys are hashes: nobody's name travels."""

    decision: str
    worker_id: int
    rank: int
    prefix: int
    """sequence hash of the last block of the longest known prefix; 0: none"""
    tokens: bytes
    """u32 little endian: the prompt ids that the token table was asked about"""
    session: int
    tenant: int
    predicted: bytes
    """the packed signature that was predicted"""
    predicted_local: float | None
    """share of pairs that the chosen rank was expected to serve itself; None where every rank is as near (TP)"""
    prior_local: float | None
    """the same under the traffic's mix, without any knowledge of the request"""
    spread: float | None = None
    """by how much more than the mean of the ranks of its engine the nearest of them was expected to serve itself, each beside its own share under the
    mix: what sending it there could bring. None: nobody said, or nothing was expected"""


class RequestsFinished(Event, frozen=True, kw_only=True):
    """Requests a router has seen to their end, for the tracker to learn from. Not stored."""

    model: str
    tables: int
    """version of the tables that were predicted from"""
    clusters: int
    requests: tuple[RequestOutcome, ...]


class ClustersPublished(Event, frozen=True, kw_only=True):
    """The tracker's cluster model of a model. Not stored; asked for with `DescribeClusters`."""

    model: str
    record: ClusterRecord


class DescribeClusters(Event, frozen=True, kw_only=True):
    """Request to the tracker: answer with the `ClustersPublished` of a model; `RequestRefused` when it has none yet."""

    model: str


class KeyedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a table: `keys` u64 little endian [n], `rows` [n, fleet.prediction.ROW] bytes. Later ones replace earlier ones of a key; a row
    with no tokens behind it says that the key is forgotten."""

    keys: bytes = b""
    rows: bytes = b""


class TablesPublished(Event, frozen=True, kw_only=True):
    """Prediction tables of a model, whole or what changed since `base`. Not stored; asked for with `DescribeTables`."""

    model: str
    version: int
    base: int | None = None
    """version this is a change to; None: whole. A reader whose version is another asks for the whole; so does every reader of a change to itself
    (base = version), by which new whole tables are announced that are too large to be published"""
    clusters: int
    """version of the cluster model"""
    shares: bytes
    """float32 [clusters]: the traffic's mix now"""
    trust: dict[str, float]
    """by source, whoever else speaks"""
    trusts: bytes = b""
    """float32 little endian [fleet.prediction.PATTERNS, sources]: by who speaks, and better; empty: `trust` whoever speaks"""
    reliability: dict[str, float]
    """by source: share of the way from the mix to hindsight that it goes, in [0, 1]"""
    gain: float
    """in [0, 1]: what the expert term is worth at present, over all"""
    gains: bytes = b""
    """float32 little endian [clusters], in [0, 1]: what it is worth for requests of each cluster; a request's own is their mean by its weights.
    Empty: `gain` for all"""
    buckets: int
    """rows of the token table; a token's row is its id modulo this"""
    token_rows: bytes = b""
    """u32 little endian [n]: the rows of the token table that are told"""
    token_ratios: bytes = b""
    """float16 little endian [n, clusters]"""
    blocks: KeyedRows = KeyedRows()
    sessions: KeyedRows = KeyedRows()
    tenants: KeyedRows = KeyedRows()


class DescribeTables(Event, frozen=True, kw_only=True):
    """Request to the tracker: answer with the whole `TablesPublished` of a model; `RequestRefused` when it has none yet."""

    model: str


class PopularityShifted(Event, frozen=True, kw_only=True):
    """What is popular now differs from what was, beyond sampling noise (`settled` False); later, that it no longer does. Not stored."""

    model: str
    version: int
    settled: bool
    divergence: float
    """Jensen-Shannon divergence of the fast from the slow profile, nats, mean over layers"""
    threshold: float
    """what noise alone would hardly exceed"""
    layers: tuple[int, ...]
    """the layers that moved, most first"""
    traceparent: str = ""
    """W3C; of the span of this shift: what is done about it goes on below it"""


class ProfilePublished(Event, frozen=True, kw_only=True):
    """The tracker's global profile of a model: probabilities per layer. Not stored; asked for with `DescribeProfile`."""

    model: str
    version: int
    tokens: float
    """decayed exposure behind the profile"""
    profile: ExpertTable


class DemandPublished(Event, frozen=True, kw_only=True):
    """Tokens per second that requests living on one rank send to each expert (fast time constant). Not stored."""

    engine: str
    worker_id: int
    rank: int
    model: str
    version: int
    tokens_per_second: float
    demand: ExpertTable
    """(token, k) pairs per second"""
    pairs: float = 0.0
    """decayed (token, k) pairs behind each layer of `demand`, mean over layers: how far it can be trusted; 0: nothing is wanted, or nobody said"""
    remote: float | None = None
    """share of the demand whose expert has no replica on this rank; None: placement unknown, or nothing is wanted"""


class PlacementCommitted(Event, frozen=True, kw_only=True):
    """An engine serves this placement from now on. Stored."""

    engine: str
    worker_id: int
    layout: Layout
    placement: PlacementRecord
    plan: str | None = None


class HomesPublished(Event, frozen=True, kw_only=True):
    """Where an engine's requests should live: for each cluster, how much of its traffic belongs on which rank. Not stored; the planner says it
    when it changes, and again every cycle for those who missed it."""

    engine: str
    worker_id: int
    model: str
    version: int
    """grows with every change, also across restarts of the planner"""
    epoch: int
    """placement epoch that the homes were found for"""
    clusters: int
    """version of the cluster model whose clusters these are"""
    count: int
    """K, clusters of that model"""
    ranks: int
    homes: bytes
    """float32 little endian [K, ranks]: shares that add up to 1 per cluster; a row of zeros: at home everywhere. Empty: no cluster has a home.
    They hold from `epoch` on: a reader that serves an older one keeps those it has until it gets there"""
    reason: str = ""
    """in a sentence: why these, or why none"""


class DescribePlan(Event, frozen=True, kw_only=True):
    """Request to the planner: answer with the `PlanDescribed` of an engine, as things are now; nothing is moved. `RequestRefused` for an engine
    of which too little is known to say anything."""

    engine: str
    policy: str = ""
    """name of a policy of the planner; empty: the configured one"""
    budget_bytes: int | None = None
    """at most so many bytes are copied; None: as configured"""
    memory: bool = False
    """also tell what each further redundant slot per rank would be worth"""
    dead: tuple[int, ...] = ()
    """as if these ranks were lost"""
    layers: tuple[int, ...] = ()
    """change only these MoE layers; empty: all"""


class PlanDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribePlan`: a plan, or why there is none."""

    engine: str
    worker_id: int
    record: bytes
    """JSON: `migration.model.plan_record.PlanRecord`"""
    plan: bytes = b""
    """JSON: `migration.model.plan.Plan`, for `ApplyPlan`; empty: there is none"""


class ExpertCopy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An expert's weights brought from a slot into another. Slots are numbered over all ranks, as in `Placement`."""

    layer: int
    expert: int
    source: int
    """slot they are read from, in the epoch that is served"""
    slot: int
    """slot that serves them from the next epoch on"""


class ExpertArrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Weights that a handover brought to a rank: [layer, expert, rank they were read from, rank they came to]."""

    layer: int
    expert: int
    source: int
    rank: int


class ProposeHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: stage what it needs to serve the next epoch (`fleet.handover`). Answered at once with `HandoverDescribed`; that it has
    staged is published, and answered to a repetition."""

    engine: str
    worker_id: int
    rank: int
    token: int
    """fencing token of the coordinator's lease"""
    handover: int
    """number of the handover; only grows"""
    plan: str
    placement: PlacementRecord
    """of the epoch that it makes"""
    copies: tuple[ExpertCopy, ...] = ()
    """those of all ranks: each knows what it pulls, and what others read of it"""
    deadline_seconds: float
    """for staging, from when the rank hears of it"""
    traceparent: str = ""
    """W3C; of the handover's span"""


class CommitHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: serve the new epoch as soon as every rank is ready. Sent only once the decision is durable."""

    worker_id: int
    rank: int
    token: int
    handover: int


class AbortHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: drop what was staged."""

    worker_id: int
    rank: int
    token: int
    handover: int
    reason: str


class DescribeHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: say where you are."""

    worker_id: int
    rank: int
    token: int = 0
    """of a coordinator that asks: the rank listens to none before it from then on; 0: somebody only looks"""


class PullTold(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one rank read from another in a handover."""

    source: int
    """rank"""
    transfer: str
    """by which way: nixl, shared, local"""
    experts: int
    bytes: int
    seconds: float
    """of reading; comparing checksums not included"""


class HandoverDescribed(Event, frozen=True, kw_only=True):
    """Where one rank is. Answer to every command about handovers, and published whenever it changes; not stored."""

    worker_id: int
    rank: int
    state: str
    """`fleet.handover.RankState`"""
    served: int
    """epoch"""
    token: int
    """highest seen"""
    handover: int
    """the open one; 0: none"""
    concluded: int
    """highest that is over"""
    flipped: int
    """the last that was flipped to"""
    verdict: str = ""
    """`fleet.handover.Verdict` on the command that this answers; empty: nothing was commanded"""
    failure: str = ""
    """why it could not stage: whose fault, and what to do"""
    fault: str = ""
    """the same in a word, for metrics"""
    seconds: float = 0.0
    """since the open handover was proposed, or that the last one took"""
    pulls: tuple[PullTold, ...] = ()
    free: int = 0
    """cells for experts on their way in"""
    quarantined: int = 0
    """cells in which bytes may still land"""
    draining: int = 0
    """cells that others may still read"""
    oldest_seconds: float = 0.0
    """since when the oldest of those is held"""


class MemoryAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How another rank can read a rank's expert memory. Readers check every number: they use them as addresses."""

    cells: int
    cell_bytes: int
    layout: str
    """hash of what a cell holds: tensors' names, dtypes, shapes and offsets"""
    base: int
    """address in the process"""
    device: int = 0
    kind: str = "DRAM"
    """NIXL's name of the memory"""
    agent: str = ""
    """NIXL agent, with its incarnation; empty: it speaks no NIXL"""
    metadata: bytes = b""
    """NIXL's, of that agent"""
    host: str = ""
    """identity of machine and process namespace; equal ones can share memory"""
    pid: int = 0
    descriptor: int = -1
    """file descriptor of the memory in that process; -1: it cannot be shared"""
    inode: int = 0
    """of that file, so that it is taken for no other"""


class LeaseExperts(Event, frozen=True, kw_only=True):
    """Request of one rank to another of its engine: let me read these experts, and change none of them meanwhile. A repetition renews the lease."""

    worker_id: int
    rank: int
    """that is asked"""
    reader: int
    """rank that asks"""
    handover: int
    experts: tuple[tuple[int, int, int], ...]
    """(layer, slot over all ranks, expert)"""
    seconds: float
    """how long the lease holds without renewal"""


class ExpertsLeased(Event, frozen=True, kw_only=True):
    """Answer to `LeaseExperts`."""

    worker_id: int
    rank: int
    lease: int
    memory: MemoryAddress
    cells: tuple[int, ...]
    """where they are"""
    checksums: tuple[tuple[int, ...], ...]
    """u64 per tensor of each: what was loaded or verified, not what lies there now"""


class EndLease(Event, frozen=True, kw_only=True):
    """Request: the reads of a lease have settled. Answered with `LeaseEnded`; unknown leases have ended too."""

    worker_id: int
    rank: int
    lease: int


class LeaseEnded(Event, frozen=True, kw_only=True):
    """Answer to `EndLease`."""

    worker_id: int
    rank: int
    lease: int


class MigrateExpert(Event, frozen=True, kw_only=True):
    """Request to the migration service: bring an expert to a rank. Answered with `MigrationAccepted`."""

    engine: str
    layer: int
    expert: int
    rank: int
    """where it shall be"""
    source: int | None = None
    """rank to read from; None: the nearest that has it"""
    move: bool = False
    """it leaves the rank it is read from"""
    swap: int | None = None
    """expert of the layer that goes the other way; None: chosen, where there is no free slot"""


class ApplyPlan(Event, frozen=True, kw_only=True):
    """Request to the migration service: carry out this plan. Answered with `MigrationAccepted`."""

    engine: str
    plan: bytes
    """JSON: `migration.model.plan.Plan`"""


class RollBack(Event, frozen=True, kw_only=True):
    """Request to the migration service: bring an engine back to the placement before a plan. Answered with `MigrationAccepted`."""

    engine: str
    plan: str = ""
    """id; empty: the last one of which anything was committed"""


class MigrationAccepted(Event, frozen=True, kw_only=True):
    """Answer: a plan will be carried out; `MigrationPlanned` and what follows it tell how it goes."""

    engine: str
    worker_id: int
    plan: str
    handovers: int
    copies: int
    bytes: int
    what: tuple[str, ...] = ()
    """its steps in words, the first of them"""


Origin = Literal["operator", "planner", "rollback"]


class LoopFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine serves its requests under a placement: foretold by the planner, or measured (`DispatchMeasured`)."""

    remote_ranks: float
    """distinct other ranks that a token is sent to in a layer, mean"""
    local: float
    """share of (token, k) pairs served where their request lives"""
    balance: float
    """mean / highest load of a rank, mean over layers; measured: of single steps, mean over these"""
    step_seconds: float
    """of one step"""
    tokens: float = 0.0
    """that were measured; 0: foretold"""
    communication: float | None = None
    """share of a step that ranks spend sending and waiting for each other, mean over ranks; None: predicted, or the engine cannot tell"""


class MigrationPlanned(Event, frozen=True, kw_only=True):
    """A plan is being carried out from now on. Stored."""

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
    """sha256 of the plan's JSON (`migration.model.plan.Plan`) in the blob store, until it is over; empty: there was no room to keep it"""
    traceparent: str = ""
    """W3C; of the plan's span"""
    before: LoopFigures | None = None
    """as it is foretold to go on without the plan; None: nobody has reckoned"""
    after: LoopFigures | None = None
    """and with it"""
    policy: str = ""
    """of the planner that made it; empty: somebody else's"""


class MigrationStaged(Event, frozen=True, kw_only=True):
    """Every rank of an engine holds what the next epoch needs, verified; it is about to be adopted. Stored."""

    engine: str
    worker_id: int
    plan: str
    handover: int
    number: int
    """which handover of the plan, from 0"""
    epoch: int
    """the one it makes"""
    placement: PlacementRecord
    copies: int
    bytes: int
    seconds: float
    """from the proposal"""
    pulls: tuple[PullTold, ...] = ()
    """of all ranks"""
    arrivals: tuple[ExpertArrival, ...] = ()
    """every copy; empty where a successor ended a handover whose plan it no longer has"""


class MigrationCommitted(Event, frozen=True, kw_only=True):
    """One handover of a plan is done: every rank serves its epoch. Stored, behind its `PlacementCommitted`."""

    engine: str
    worker_id: int
    plan: str
    handover: int
    number: int
    epoch: int
    copies: int
    bytes: int
    seconds: float
    """from the proposal to the last rank's flip"""
    commit_seconds: float
    """of it: from the decision"""
    last: bool
    """the plan is done with it"""
    arrivals: tuple[ExpertArrival, ...] = ()
    """as in `MigrationStaged`"""


class MigrationAborted(Event, frozen=True, kw_only=True):
    """A handover was given up, and with it the rest of its plan; the epoch before is served on. Stored."""

    engine: str
    worker_id: int
    plan: str
    handover: int
    """0: none was begun"""
    number: int
    epoch: int
    """the one that was not reached"""
    reason: str
    """whose fault, and what to do"""
    fault: str
    """the same in a word"""
    rank: int | None = None
    """whose"""
    seconds: float = 0.0


Verdict = Literal["kept", "harmful", "unknown"]


class PlanJudged(Event, frozen=True, kw_only=True):
    """What a plan of the planner's own has really brought, some time after its end. Stored, behind what became of the plan."""

    engine: str
    worker_id: int
    plan: str
    epoch: int
    """that it was judged in"""
    verdict: Verdict
    """kept: it stays; harmful: it is rolled back, and its experts rest; unknown: too little was measured, or others moved experts meanwhile"""
    predicted_before: LoopFigures
    predicted_after: LoopFigures
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None
    realised: float | None = None
    """measured gain of a step's seconds, as a share of the predicted one; below 0: it got worse. None: not measured"""
    trust: float
    """what the planner takes of predicted gains from now on, in (0, 1]"""
    reason: str
    """in a sentence"""


class SteerLoop(Event, frozen=True, kw_only=True):
    """Request to the migration service: make plans by yourself, or (paused) only what is asked for. It outlives the service. Answered with
    `LoopDescribed`."""

    paused: bool
    reason: str = ""
    """why, for whoever looks later"""


class DescribeLoop(Event, frozen=True, kw_only=True):
    """Request to the migration service: say what you do by yourself, and why. Answered with `LoopDescribed`."""


class LayerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """[layers] each, measured in the last window."""

    balance: tuple[float, ...]
    remote_ranks: tuple[float, ...]
    local: tuple[float, ...]


class PlanTold(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, for people."""

    plan: str
    origin: Origin
    policy: str
    at: float
    """Unix seconds, of its beginning"""
    outcome: str
    """under way, committed, aborted (why), kept, harmful, ..."""
    copies: int
    bytes: int
    predicted_before: LoopFigures | None = None
    predicted_after: LoopFigures | None = None
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None


class EngineLoop(msgspec.Struct, frozen=True, kw_only=True):
    """What the migration service does with one engine by itself."""

    engine: str
    worker_id: int
    epoch: int
    measured: LoopFigures | None = None
    """in the last window; None: nothing was"""
    layers: LayerFigures | None = None
    at_start: LoopFigures | None = None
    """the first window that was measured of this life of the engine"""
    decided_at: float | None = None
    """Unix seconds; None: nothing was thought over yet"""
    decided: str = ""
    """what was decided last, in a sentence: a plan, or why there is none"""
    next_seconds: float | None = None
    """until it is thought over again; None: only when asked"""
    trust: float = 1.0
    """what is taken of predicted gains, in (0, 1]"""
    spent_bytes: int = 0
    """copied by plans of the planner's own in the present interval of its budget"""
    moved_bytes: int = 0
    """copied since the service knows the engine"""
    homes: int = 0
    """clusters that have a home"""
    homes_note: str = ""
    resting: int = 0
    """experts that were moved lately, or did harm, and stay where they are"""
    plans: tuple[PlanTold, ...] = ()
    """the last ones, the newest first"""


class LoopDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeLoop` and `SteerLoop`."""

    policy: str
    automatic: bool
    """as configured"""
    paused: bool
    paused_reason: str = ""
    paused_at: float | None = None
    """Unix seconds"""
    budget_bytes: int
    budget_seconds: float
    cycle_seconds: float
    engines: tuple[EngineLoop, ...] = ()


class DescribeEngine(Event, frozen=True, kw_only=True):
    """Request to one engine: answer with your `EngineJoined`."""

    worker_id: int


class DescribeProfile(Event, frozen=True, kw_only=True):
    """Request to the tracker: answer with the `ProfilePublished` of a model; uniform, with 0 tokens, before anything was reported.
    `RequestRefused` for a model that no engine has named."""

    model: str


class DescribePopularity(Event, frozen=True, kw_only=True):
    """Request to the tracker: answer with the `PopularityDescribed` of a model."""

    model: str


class RankPopularity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: what its requests want and what it holds. Experts as (layer, expert, tokens per second), most first."""

    engine: str
    rank: int
    tokens_per_second: float
    remote: float | None
    wanted_remote: tuple[tuple[int, int, float], ...] = ()
    """wanted here, held elsewhere"""
    local_idle: tuple[tuple[int, int, float], ...] = ()
    """held here, least wanted here"""


class ClusterPopularity(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster: its share of the traffic, and how far it is from the mix (Jensen-Shannon, nats, mean over layers)."""

    cluster: int
    share: float
    distance: float


class SourceQuality(msgspec.Struct, frozen=True, kw_only=True):
    """How good one source of prediction has been."""

    source: str
    requests: int
    """outcomes in which it had something to say"""
    trust: float
    reliability: float


class PopularityDescribed(Event, frozen=True, kw_only=True):
    """Everything the tracker knows of a model, for people and for `roost popularity`."""

    model: str
    tokens: float
    """decayed exposure behind the slow profile"""
    tokens_per_second: float
    fast: ExpertTable
    """probabilities per layer, over the last seconds"""
    slow: ExpertTable
    ranks: tuple[RankPopularity, ...]
    clusters: tuple[ClusterPopularity, ...]
    shifted: bool
    divergence: float | None
    """of fast from slow, nats, mean over layers; None: too little was seen"""
    threshold: float | None
    sources: tuple[SourceQuality, ...]
    gain: float
    outcomes: int
    """requests whose prediction was compared with what they did"""
    recall: float | None
    """mass of the true most popular half of a layer's experts that was predicted / its whole mass, mean over sampled requests"""
    prior_recall: float | None
    """the same for the mix"""
    stored_blocks: int
    stored_bytes: int


class RankDrained(Event, frozen=True, kw_only=True):
    """An operator wants no new requests on a rank (`draining` True), or wants them again. What runs there goes on. Stored.

    It is about one incarnation: an engine that comes back takes requests again.
    """

    engine: str
    worker_id: int
    rank: int | None
    """None: the whole engine"""
    draining: bool
    reason: str = ""


class ConfigChanged(Event, frozen=True, kw_only=True):
    """A part took new settings while it ran, or refused them: the audit of every reload. Stored."""

    part: str
    instance: int
    """identity of the process"""
    changed: dict[str, tuple[str, str]]
    """by key: the value before and the value now, as TOML writes them; empty when nothing differed or all was refused"""
    refused: str | None = None
    """why the new settings are not used; None: they are"""


class BookedLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load that one router promised one rank for one request."""

    id: str
    """of the decision"""
    worker_id: int
    rank: int
    prefill_tokens: int
    """prompt tokens still to compute; 0 once the first token has come"""
    blocks: int
    steps: int
    """tokens still expected to be emitted"""
    age_seconds: float
    """since it was booked"""
    session: int = 0
    """hash of the conversation it belongs to, which is now at this rank; 0: nobody said"""
    prefix: bytes = b""
    """u64 little endian [n]: sequence hashes of the prompt's first blocks, which this rank will have cached. Told once, and only of ranks that do
    not report their KV cache"""
    external: bool = False
    """another data plane sends the request"""
    held: bool = False
    """external, and its first token has not come: it counts beside whatever its rank reports"""


class ReservationsChanged(Event, frozen=True, kw_only=True):
    """What one router booked, saw progress, or released since it last said so. Best effort, coalesced, not stored; readers let bookings
    expire, and let go of all of a router's when it falls silent or comes back as another `router`."""

    router: int
    """random u64 per router process; also its heartbeat, when nothing changed"""
    booked: tuple[BookedLoad, ...] = ()
    """new ones, and those of which something changed"""
    ended: tuple[str, ...] = ()
    """decision ids"""
    forgotten: tuple[str, ...] = ()
    """decision ids booked by another router, which is asked to end them (`RouteReleased` came here)"""
    computed: tuple[str, ...] = ()
    """decision ids booked by another router, which is told that their prompts are computed"""
    released_by: dict[str, str] = {}
    """by decision id, forgotten or computed, the tenant whose release it is: it ends that tenant's own bookings alone. Ids that are missing were
    released by a caller who may end any"""


class DescribeReservations(Event, frozen=True, kw_only=True):
    """Request to one router: answer with everything you have booked."""

    router: int
    """the one that asks"""


class ReservationsDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeReservations`: all that one router has booked, as of message `sequence` of `publisher_id` at least."""

    router: int
    publisher_id: int
    sequence: int
    """last ReservationsChanged that is contained; -1: none was sent yet"""
    booked: tuple[BookedLoad, ...]


class RouteRequested(Event, frozen=True, kw_only=True):
    """Request to one router: decide. For data planes that forward by themselves; the HTTP twin is `POST /v1/route[/reserve]`."""

    body: bytes
    """a chat or completions request as JSON"""
    request_id: str = ""
    session: str = ""
    tenant: str = ""
    priority: str = ""
    reserve: bool = False
    """book the load at the chosen rank, until it is released or expires"""
    wait: bool = False
    """with `reserve`: when every rank is saturated, wait for a place (the request itself must then be allowed to take so long)"""
    without: tuple[str, ...] = ()
    """as if these terms of the cost did not count; only without `reserve`"""
    gone: tuple[str, ...] = ()
    """as if these ranks ("engine/rank"), or engines, were gone; only without `reserve`"""
    traceparent: str = ""
    """W3C trace context of the asking program's span"""


class RouteDecided(Event, frozen=True, kw_only=True):
    """Answer to `RouteRequested`."""

    record: bytes
    """the decision as JSON, what `GET /v1/decisions/{id}` answers"""
    url: str
    """base URL of the chosen rank"""
    expires_seconds: float | None = None
    """a reservation ends by itself after so long; None: nothing was reserved"""
    cache_salt: str | None = None
    """to be sent to that rank as `cache_salt`; None: nothing is to be sent"""


class RouteReleased(Event, frozen=True, kw_only=True):
    """Request to one router: a reserved request computed its prompt (`first_token`) or is over. Answered with the same event; a
    reservation that is unknown or over is no error."""

    id: str
    """of the decision"""
    first_token: bool = False
    """True: the prompt is computed and the request goes on; False: it is over"""


class DescribeDecision(Event, frozen=True, kw_only=True):
    """Request to the router that made it: answer with a decision; `RequestRefused` when it is not among the last ones."""

    id: str
    tenant: str | None = None
    """of this tenant alone, others being as unknown as what never was; None: of any"""


class DecisionDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeDecision`."""

    record: bytes
    """JSON"""


class KvSnapshotRequested(Event, frozen=True, kw_only=True):
    """Request to one rank: what does your KV cache hold, as of which sequence number of your kv-events?"""

    worker_id: int
    rank: int
    after: int | None = None
    """a snapshot of a moment ago will do if it contains the kv-events message of this number (-1: any); None: as of now"""


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
    """Roost's addition, as are the next two; other readers ignore them: sequences decoding"""
    waiting: int | None = None
    """requests not yet admitted"""
    step_seconds: float | None = None
    """median length of the engine's last steps in which nothing but decoding was done; None: there were none lately"""


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
"""The closed union. Unknown tags are counted and dropped by the codec, never fatal."""

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
"""Kinds that JetStream keeps and replays; everything else is telemetry, repaired by snapshots."""
