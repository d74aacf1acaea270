"""A routing decision as it is read: what `GET /v1/decisions/{id}` and `POST /v1/route` answer, and what spans are written from."""

from typing import Literal

import msgspec

from router.fleet_state.target_table import Excluded
from router.prediction.predictor import PredictionRecord
from router.scheduling.policies import Unit, Why


class Terms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Predicted milliseconds, weighted; under the policy cost their sum in this order is the score exactly. Fields: `scoring.TERMS`.
    None: not measured, as nobody stated or measured the speed that it follows from; the score then compares and is no time."""

    prefill: float | None
    queue: float | None
    decode: float | None
    experts: float | None
    distinct: float | None
    lockstep: float | None
    handover: float | None


class PromisedLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the rank was already promised."""

    prefill_tokens: int
    requests: int
    blocks: int
    steps: int
    """tokens that its requests are expected to emit yet"""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank as it was priced. `worker_id` is a u64 and therefore text."""

    engine: str
    rank: int
    worker_id: str
    score: float
    """what the policy minimises, in the record's `unit`"""
    terms_ms: Terms
    """whatever the policy"""
    speed: Literal["stated", "measured", "not measured"] = "stated"
    """where its milliseconds come from: the engine or the settings, the router's measurements, or nowhere yet"""
    overlap_blocks: int
    overlap_approximate: bool
    uncached_tokens: int
    load: PromisedLoad
    remote_ranks: float | None
    """expected distinct remote ranks of a token, summed over MoE layers; None: not priced, `experts_note` says why"""
    remote_nodes: float | None
    """the same of nodes"""
    local_share: float | None
    """share of the request's routed pairs that is expected to find its expert here"""
    added_experts: float | None
    """experts that a step of the engine is expected to read for this request alone, summed over MoE layers"""
    home_lift: float | None
    """how many times its even share of such requests the planner wants the rank to get; None: it has given no cluster a home"""
    experts_note: str | None


class HomesEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """Which homes: the planner's version of them, and the placement epoch from which on they hold."""

    version: int
    epoch: int


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of everything the decision was made with."""

    placement: dict[str, int | None]
    """that is served, by engine"""
    prices: dict[str, int | None]
    """placement epoch that the expert terms are of, by engine; it follows the one above within moments. None: not priced yet; empty: there were no
    prediction tables"""
    homes: dict[str, HomesEpoch]
    """that go with these prices, by engine; engines of which the planner said nothing are left out"""
    tables: int | None
    """prediction tables; None: there were none"""
    clusters: int | None
    view: int


class Supposed(msgspec.Struct, frozen=True, kw_only=True):
    """What the decision was asked to suppose: terms that do not count, and ranks that are gone."""

    without: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as JSON."""

    id: str
    request_id: str
    model: str
    prompt_tokens: int
    expected_output_tokens: int
    policy: Literal["cost", "classic", "kv", "least_loaded", "round_robin"]
    unit: Unit
    """of scores and margin; "1": they have none, by the policy or because some candidate's speed is not measured"""
    chosen: str
    """engine/rank"""
    why: Why
    runner_up: str | None
    """the lowest score but the chosen one's"""
    margin: float | None
    """the runner-up's score less the chosen one's; negative where a session or chance chose a dearer rank"""
    tied: int
    """candidates that shared the lowest score"""
    seed: str
    without: dict[str, str]
    """who would have been chosen had a term not counted, by term; terms of weight 0, and those of other policies than cost, are left out"""
    if_gone: str | None
    """who would have been chosen had the chosen rank been gone; None: there was no other"""
    supposed: Supposed | None
    """None: nothing"""
    session_rank: str | None
    """the rank that the conversation was at, as far as it is still routed to"""
    home_ranks: list[str]
    """candidates where the planner wants requests like this to live, by what was foretold of it; empty: nowhere, or nothing is known of that"""
    homes_note: str | None
    """why these were not heeded, or why there are none; None: they were heeded"""
    candidates: list[Candidate]
    """lowest score first"""
    excluded: list[Excluded]
    ignored: list[Excluded]
    """breakers and outliers that were not heeded, because no other rank was left"""
    weights: dict[str, float]
    epochs: Epochs
    prediction: PredictionRecord | None
    attempt: int
    replaces: str | None
    cause: str | None
    tenant: str | None = None
    """that the request belongs to, by its key; None: no key says so"""
    cache: Literal["common", "tenant", "shared"] = "common"
    """whose KV it may reuse: common, that of all requests without a salt; tenant, that of its own tenant (and `cache_salt`) alone; shared:
    its own alone was asked for, but the chosen engine does not isolate tenants"""
