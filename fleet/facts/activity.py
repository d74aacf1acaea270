"""Facts about traffic, as engines and routers measured it: activated experts, dispatch, request profiles and
outcomes.
"""

import msgspec

from fleet.event import Event
from fleet.popularity import ExpertCounts


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


class RearrangementTime(msgspec.Struct, frozen=True, kw_only=True):
    """Measured duration of one map change of an engine that moves its experts itself."""

    layers: int
    """layers in which any rank received an expert from another"""
    bytes: int
    """that the busiest rank of each layer received, summed over layers"""
    seconds: float


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
    rearrangements: tuple[RearrangementTime, ...] = ()
    """map changes in the interval, of an engine that moves its experts itself (`EngineJoined.rearranges`)"""


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
    """share of the computed (token, k) pairs that this rank served itself; None: nothing was computed, or the
    engine cannot tell
    """
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


class TokensSampled(Event, frozen=True, kw_only=True):
    """Experts of some tokens of finished requests, as they were chosen together. Not stored."""

    engine: str
    worker_id: int
    rank: int
    model: str
    requests: tuple[bytes, ...]
    """of each request u16 little endian [`fleet.routings.SAMPLED_TOKENS`, layers, k]: experts of computed
    tokens, evenly spaced over prompt and completion"""


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
