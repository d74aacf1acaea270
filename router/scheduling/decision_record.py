"""Readable form of a routing decision: the answer of `GET /v1/decisions/{id}` and `POST /v1/route`, and the
source of spans.
"""

from typing import Literal

import msgspec

from router.fleet_state.target_table import Excluded
from router.prediction.predictor import PredictionRecord
from router.scheduling.cost import TERMS
from router.scheduling.policies import Unit, Why

_ABOUT_TERMS = """Predicted milliseconds, weighted. Under the policy cost their sum in this order is exactly
the score. Fields: `cost.TERMS`. None: the underlying speed is neither stated nor measured; the score is then
a comparison, not a time.
"""
Terms = msgspec.defstruct(
    "Terms",
    [(term, float | None) for term in TERMS],
    namespace={"__doc__": _ABOUT_TERMS},
    module=__name__,
    frozen=True,
    kw_only=True,
    gc=False,
)


class PromisedLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outstanding load of the rank before this request."""

    prefill_tokens: int
    requests: int
    blocks: int
    steps: int
    """tokens that its requests are still expected to emit"""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank with its prices. `worker_id` is a u64 and therefore text."""

    engine: str
    rank: int
    worker_id: str
    score: float
    """minimised by the policy, in the record's `unit`"""
    terms_ms: Terms  # type: ignore[valid-type]  # its fields are the rows of a table
    """present under every policy"""
    speed: Literal["stated", "measured", "not measured"] = "stated"
    """source of its milliseconds: the engine or the settings, the router's measurements, or none yet"""
    overlap_blocks: int
    overlap_approximate: bool
    uncached_tokens: int
    load: PromisedLoad
    remote_ranks: float | None
    """expected distinct remote ranks of a token, summed over MoE layers; None: not priced, see `experts_note`
    """
    remote_nodes: float | None
    """the same for nodes"""
    local_share: float | None
    """share of the request's routed pairs expected to find their expert here"""
    added_experts: float | None
    """experts that a step of the engine is expected to read for this request alone, summed over MoE layers"""
    home_lift: float | None
    """planned share of the rank as a multiple of its even share of such requests; None: the planner has given
    no cluster a home
    """
    experts_note: str | None


class HomesEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """Version of the planner's homes, and the placement epoch from which they apply."""

    version: int
    epoch: int


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of everything that the decision was made with."""

    placement: dict[str, int | None]
    """served placement epoch, by engine"""
    prices: dict[str, int | None]
    """placement epoch of the expert terms, by engine. It follows the served epoch within moments. None: not
    priced yet; empty: there were no prediction tables
    """
    homes: dict[str, HomesEpoch]
    """homes that match these prices, by engine; engines without homes from the planner are left out"""
    tables: int | None
    """version of the prediction tables; None: there were none"""
    clusters: int | None
    view: int


class Supposed(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions of a what-if decision: terms that do not count, and ranks that are gone."""

    without: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class PrefillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill of a prompt at a worker of its own, before the decision of the worker that decodes."""

    decision: "DecisionRecord | None"
    """the last decision of a prefill worker; None: there was none"""
    failure: str | None
    """reason why no KV was handed over, so that the chosen rank computes the prompt itself; None: it fetches
    the KV, whose time is its prefill term
    """
    transfer_token_ms: float
    """expected time to fetch the KV of one token"""
    activated_tokens: int
    """prompt tokens whose experts the prefill worker reported; they replace the prediction in their share of
    the prompt
    """


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as JSON."""

    id: str
    request_id: str
    model: str
    prompt_tokens: int
    expected_output_tokens: int
    policy: Literal["cost", "classic", "kv", "least_loaded", "round_robin"]
    unit: Unit
    """of scores and margin; "1": dimensionless, because of the policy or because some candidate's speed is
    not measured
    """
    chosen: str
    """engine/rank"""
    why: Why
    runner_up: str | None
    """the lowest score except the chosen one's"""
    margin: float | None
    """the runner-up's score minus the chosen one's; negative if a session or chance chose a more expensive
    rank
    """
    tied: int
    """number of candidates with the lowest score"""
    seed: str
    without: dict[str, str]
    """choice without a term, by term; terms of weight 0 and those of policies other than cost are left out"""
    if_gone: str | None
    """choice without the chosen rank; None: there was no other"""
    supposed: Supposed | None
    """None: no assumptions"""
    session_rank: str | None
    """last rank of the session, if it is still routed to"""
    home_ranks: list[str]
    """candidates that the planner designates as homes for requests like this, by its prediction; empty: there
    are none, or they are unknown
    """
    homes_note: str | None
    """reason for ignoring the homes, or for having none; None: they were applied"""
    dialect: Literal["ids", "text"] = "ids"
    """form in which the request is sent to the rank: the ids of its prompt, or the client's own text"""
    hashed: Literal["ids", "text"] = "ids"
    """what the prompt's blocks were hashed from. By ids they are those of the ranks' KV events; by text they
    are an estimate, which finds only prompts that this fleet's routers sent before
    """
    headers: dict[str, str] = {}
    """headers that tell the chosen rank from others behind the same URL or, of the routes for other data
    planes, behind the same frontend of Dynamo
    """
    candidates: list[Candidate]
    """lowest score first"""
    excluded: list[Excluded]
    ignored: list[Excluded]
    """breakers and ejections that were ignored because no other rank was left"""
    weights: dict[str, float]
    epochs: Epochs
    prediction: PredictionRecord | None
    attempt: int
    replaces: str | None
    cause: str | None
    prefill: PrefillRecord | None = None
    """None: the prompt was not sent to a prefill worker"""
    trace_id: str | None = None
    """trace that the request belongs to, 32 hexadecimal digits; None: none is known"""
    tenant: str | None = None
    """tenant of the request, by its API key; None: the key names none"""
    cache: Literal["common", "tenant", "shared"] = "common"
    """KV that the request may reuse. common: that of all requests without a salt; tenant: that of its own
    tenant (and `cache_salt`) only; shared: only its own was requested, but the chosen engine does not isolate
    tenants
    """
