"""One routing decision: a value that can be read back, term by term. Pure; randomness comes in as a
number."""

from collections.abc import Sequence
from typing import Any, Literal
from weakref import ReferenceType

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IntArray
from fleet.signatures import ClusterModel
from fleet.timing import dispatch_seconds
from router.fleet_state.cluster_homes import is_home
from router.fleet_state.engine_state import Versions
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.target_table import Excluded, RankKey, Target, TargetTable, columns
from router.prediction.predictor import (
    NO_GAIN,
    NO_KEYS,
    UNKNOWN_MODEL,
    PredictionKeys,
    PredictionRecord,
    RequestPrediction,
)
from router.scheduling.cost import COST_TERMS, TERMS, ExpectedLoad, Scores, Weights, score, uncached_tokens
from router.scheduling.decision_record import (
    Candidate,
    DecisionRecord,
    Epochs,
    HomesEpoch,
    PrefillRecord,
    PromisedLoad,
    Supposed,
    Terms,
)
from router.scheduling.filters import Candidates
from router.scheduling.policies import (
    CandidateFacts,
    HomeRanks,
    PolicyChoice,
    PolicyRules,
    Unit,
    choose,
    scored,
)

NOTHING = Supposed()
HomeOutcome = Literal["reached", "passed", "ignored", "none"]
"""Outcome of home placement. reached: a home was chosen; passed: that would have cost more than it saves;
ignored: the homes were ignored (`DecisionRecord.homes_note`); none: the request has no home.
"""
_COLUMN_BYTES = 8 * (3 + AMOUNTS + len(TERMS) + 2 + 1 + 4)
"""Bytes of one candidate: place, overlap and uncached tokens; load; terms; their sum and the outstanding
work; score; four columns of the prediction.
"""
_MIN_GAIN = 1e-6
HOME_WORTH = 2.5
"""Value of a home, in predicted savings of sending tokens: the saving itself; the same for the requests that
step together with it, as the terms queue and lockstep count a wait for both; and half of it because a request
that is placed elsewhere takes a place that is the home of another one. The expert term already has `gain` of
it.
"""
_BYTES, _CANDIDATE_BYTES = 4096, 8 * (len(TERMS) + AMOUNTS + 10)
"""Bytes of a decision, and of each candidate's entry in its columns."""


class Owner(msgspec.Struct, frozen=True):
    """Tenant that a request belongs to. tenant: from its API key, "" without keys; salt: the request shares
    KV only with requests of the same salt.
    """

    tenant: str = ""
    salt: str = ""


UNKNOWN_OWNER = Owner()


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The prefill of a prompt at a worker of its own, before the decision of the rank that decodes."""

    decision: "Decision | None" = None
    """the last decision of a prefill worker"""
    failure: str | None = None
    """reason why no KV was handed over; None: the chosen rank fetches it"""
    token_s: float = 0.0
    """seconds to fetch the KV of one token"""
    experts: NDArray[np.unsignedinteger[Any]] | None = None
    """[layers, experts] routed pairs that the prompt activated there; None: not reported"""
    tokens: int = 0
    """prompt tokens behind them"""

    def record(self, most: int | None) -> PrefillRecord:
        """Return the form for readers. most: limit on the candidates of its decision."""
        return PrefillRecord(
            decision=None if self.decision is None else self.decision.record(most),
            failure=self.failure,
            transfer_token_ms=1000.0 * self.token_s,
            activated_tokens=self.tokens,
        )


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The request, as far as it determines the price. `output_tokens` is the expected number, not the
    limit."""

    decision_id: str
    seed: int
    """breaks ties"""
    model: str
    prompt_tokens: int
    output_tokens: int
    attempt: int = 1
    replaces: str | None = None
    """id of the failed decision before this one"""
    cause: str | None = None
    """failure of that decision"""
    request_id: str = ""
    keys: PredictionKeys = NO_KEYS
    """hashes of the sender's identity"""
    supposed: Supposed = NOTHING
    owner: Owner = UNKNOWN_OWNER
    hashed: Literal["ids", "text"] = "ids"
    """what the prompt's blocks were hashed from"""
    prefill: RemotePrefill | None = None
    """None: the prompt was not sent to a prefill worker"""
    trace_id: str = ""
    """trace that the request belongs to; "": none is known"""

    @property
    def fetches_kv(self) -> bool:
        """True if the chosen rank fetches the prompt's KV instead of computing it."""
        return self.prefill is not None and self.prefill.failure is None


class TargetPredictions(msgspec.Struct, frozen=True, eq=False):
    """Prediction for a request, and its expected expert load at each candidate (`PriceList.of`), float64 [4,
    candidates]. prior_local: the local share of the mix of the traffic. All but the added experts are 0 and
    meaningless where `priced`, bool [candidates], is false.
    """

    request: RequestPrediction
    expert_load: FloatArray
    prior_local: FloatArray
    priced: NDArray[np.bool_]
    home: FloatArray | None = None
    """float64 [candidates], planned share of the rank as a multiple of its even share of such requests; None:
    the planner has published no homes
    """
    versions: Versions | None = None
    """of prices and homes"""
    clusters: ReferenceType[ClusterModel] | None = None
    """the clusters of the prediction. Weak, so that a retained decision does not keep megabytes of old
    clusters alive
    """

    @property
    def expected(self) -> ExpectedLoad | None:
        """Load that has a price; None: the prediction has no weight."""
        gain = self.request.gain
        return ExpectedLoad(self.expert_load, gain) if gain else None

    @property
    def local(self) -> FloatArray:
        """Expected share of pairs that the rank serves itself, float64 [candidates]."""
        row: FloatArray = self.expert_load[2]
        return row

    @property
    def remote_share(self) -> FloatArray:
        """Calibrated share of routed pairs that another rank serves, float64 [candidates]; 0 where nothing is
        priced.
        """
        return np.where(self.priced, self.request.gain * (1.0 - self.local), 0.0)

    def record(self) -> PredictionRecord:
        """Return the prediction for readers, with the experts behind it while its clusters are in memory."""
        return self.request.record(None if self.clusters is None else self.clusters())

    def of(self, at: NDArray[np.intp]) -> "TargetPredictions":
        """Return the predictions for some of the candidates."""
        home = None if self.home is None else columns(self.home, at)
        return TargetPredictions(
            self.request,
            columns(self.expert_load, at),
            columns(self.prior_local, at),
            columns(self.priced, at),
            home,
            self.versions,
            self.clusters,
        )


class Conditions(msgspec.Struct, frozen=True):
    """State of the fleet when the request arrives. load: int64 [AMOUNTS, targets]; switch_delay and factors
    as in `cost.score`. held: the last rank of its session; turn: number of decisions for this model so far.
    """

    load: IntArray
    switch_delay: NDArray[np.float64] | None = None
    factors: NDArray[np.float64] | None = None
    held: RankKey | None = None
    turn: int = 0
    measured: NDArray[np.bool_] | None = None
    """bool [2, targets]: true where predicted prefill and decode seconds are stated or measured, false where
    they are a guess for comparison; None: all true
    """


class Decision(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Columns have one entry per candidate, in the order of the target table. `record()` is the form for
    readers.
    """

    ask: Ask
    target_table: TargetTable
    at: NDArray[np.intp]
    overlap_blocks: NDArray[np.int64]
    uncached: NDArray[np.int64]
    load: IntArray
    """int64 [AMOUNTS, candidates]"""
    scores: Scores
    score: FloatArray
    """minimised by the policy"""
    unit: Unit
    choice: PolicyChoice
    held: int | None
    """index of the last rank of the session"""
    excluded: Sequence[Excluded]
    ignored: tuple[Excluded, ...]
    """exclusions that were ignored because no other rank was left"""
    rules: PolicyRules
    view_version: int
    prediction: TargetPredictions | None
    """None: there are no prediction tables"""
    home: HomeRanks | None
    """homes of the request, if they were applied; None: it has none"""
    target: Target
    """the chosen rank"""
    measured: NDArray[np.bool_] | None = None
    """bool [2, candidates], as `Conditions.measured`"""

    @property
    def id(self) -> str:
        return self.ask.decision_id

    @property
    def chosen(self) -> int:
        """Index into the columns."""
        return self.choice.chosen

    @property
    def weights(self) -> Weights:
        return self.rules.weights

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the chosen rank is believed to have cached, before it fetches others."""
        if self.ask.fetches_kv:
            blocks = int(self.overlap_blocks[self.chosen])
            return min(blocks * self.target.engine.block_size, self.ask.prompt_tokens - 1)
        return self.ask.prompt_tokens - int(self.uncached[self.chosen])

    @property
    def runner_up(self) -> int | None:
        """Index of the lowest score except the chosen one's; None: there is no other."""
        if len(self.at) == 1:
            return None
        others = self.score.copy()
        others[self.chosen] = np.inf
        return int(others.argmin())

    @property
    def margin(self) -> float | None:
        """The runner-up's score minus the chosen one's, in `unit`."""
        other = self.runner_up
        return None if other is None else float(self.score[other] - self.score[self.chosen])

    def is_measured(self, candidate: int) -> bool:
        """Return True if a candidate's terms are stated or measured milliseconds."""
        return self.measured is None or bool(self.measured[0, candidate] and self.measured[1, candidate])

    def terms_ms(self, candidate: int) -> list[float | None]:
        """Return a candidate's terms in the order of TERMS; None where the underlying speed is neither stated
        nor measured.
        """
        return self._known_terms(candidate, self.scores.terms[:, candidate].tolist())

    def _known_terms(self, candidate: int, terms: list[float]) -> list[float | None]:
        if self.measured is None:
            return [*terms]
        known = self.measured[:, candidate].tolist()
        return [
            value if term.speed is None or known[term.speed] else None
            for value, term in zip(terms, COST_TERMS, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Approximate memory of the columns, with those of the prefill's decision."""
        own = _COLUMN_BYTES * len(self.at)
        before = None if self.ask.prefill is None else self.ask.prefill.decision
        return own if before is None else own + before.nbytes

    @property
    def shared_cache(self) -> bool:
        """True if the request has a salt but its rank ignores salts, so that tenants share the rank's KV
        cache.
        """
        return bool(self.ask.owner.salt) and not self.target.engine.capabilities.isolates_tenants

    @property
    def cache_salt(self) -> str:
        """Salt to send to the chosen rank; "": the request has none, or the rank accepts none."""
        return self.ask.owner.salt if self.target.engine.capabilities.isolates_tenants else ""

    @property
    def home_outcome(self) -> HomeOutcome:
        """Outcome of home placement for this request."""
        if self.home is not None and self.home.at.any():
            return "reached" if self.home.at[self.chosen] else "passed"
        return (
            "ignored"
            if self.home is None and self.prediction is not None and self.prediction.home is not None
            else "none"
        )

    def name(self, candidate: int) -> str:
        """Return engine/rank of a candidate."""
        return self.target_table.targets[int(self.at[candidate])].name

    def without(self, term: str) -> int:
        """Return the candidate that would have been chosen without a term (policy cost)."""
        total = np.add.reduce(np.delete(self.scores.terms, TERMS.index(term), axis=0), axis=0)
        home = None if term == "experts" else self.home
        return choose(
            self.rules, total, self.unit, total, self.scores.outstanding, self.ask.seed, self.held, home
        ).chosen

    def if_gone(self) -> int | None:
        """Return the candidate that would have been chosen without the chosen rank; None: there is no
        other."""
        left = np.delete(np.arange(len(self.at)), self.chosen)
        if not len(left):
            return None
        held = (
            None if self.held is None or self.held == self.chosen else self.held - (self.held > self.chosen)
        )
        home = None if self.home is None else self.home.of(left)
        choice = choose(
            self.rules,
            self.score[left],
            self.unit,
            self.scores.total[left],
            self.scores.outstanding[left],
            self.ask.seed,
            held,
            home,
        )
        return int(left[choice.chosen])

    def record(self, most: int | None = None) -> DecisionRecord:
        """Return the decision for readers. Candidates are sorted by score, the chosen one before its equals.
        most: limit on the number of candidates, since each takes some microseconds.
        """
        order: list[int] = self.score.argsort(kind="stable").tolist()
        if self.choice.why in ("cheapest", "tie", "home"):  # equals may differ by rounding
            order.remove(self.chosen)
            order.insert(0, self.chosen)
        weights = dict(self.weights.by_term)
        other, gone = self.runner_up, self.if_gone()
        return DecisionRecord(
            id=self.id,
            request_id=self.ask.request_id,
            model=self.ask.model,
            prompt_tokens=self.ask.prompt_tokens,
            expected_output_tokens=self.ask.output_tokens,
            policy=self.rules.policy,
            unit=self.unit if self.measured is None or bool(self.measured.all()) else "1",
            chosen=self.target.name,
            why=self.choice.why,
            runner_up=None if other is None else self.name(other),
            margin=self.margin,
            tied=self.choice.tied,
            seed=str(self.ask.seed),
            without=(
                {term: self.name(self.without(term)) for term in TERMS if weights[term]}
                if self.rules.policy == "cost"
                else {}
            ),
            if_gone=None if gone is None else self.name(gone),
            supposed=None if self.ask.supposed == NOTHING else self.ask.supposed,
            session_rank=None if self.held is None else self.name(self.held),
            home_ranks=[self.name(at) for at in self._home_mask().nonzero()[0].tolist()],
            homes_note=self._homes_note(),
            dialect=self.target_table.dialect,
            hashed=self.ask.hashed,
            headers={name.decode(): value.decode() for name, value in self.target.rank_header},
            candidates=self._candidates(order[:most]),
            excluded=list(self.excluded),
            ignored=list(self.ignored),
            weights=weights,
            epochs=self._epochs(),
            prediction=None if self.prediction is None else self.prediction.record(),
            attempt=self.ask.attempt,
            replaces=self.ask.replaces,
            cause=self.ask.cause,
            prefill=None if self.ask.prefill is None else self.ask.prefill.record(most),
            trace_id=self.ask.trace_id or None,
            tenant=self.ask.owner.tenant or None,
            cache="shared" if self.shared_cache else "tenant" if self.ask.owner.salt else "common",
        )

    def _epochs(self) -> Epochs:
        request_prediction, versions = (
            (None, None) if self.prediction is None else (self.prediction.request, self.prediction.versions)
        )
        return Epochs(
            placement={target.engine.engine: target.epoch for target in self.target_table.targets},
            prices={} if versions is None else versions.prices,
            homes=(
                {}
                if versions is None
                else {
                    engine: HomesEpoch(version=of, epoch=epoch)
                    for engine, (of, epoch) in versions.homes.items()
                }
            ),
            tables=None if request_prediction is None else request_prediction.tables,
            clusters=None if request_prediction is None else request_prediction.clusters,
            view=self.view_version,
        )

    def _home_mask(self) -> NDArray[np.bool_]:
        """Return the homes of the request, applied or not, bool [candidates]."""
        lift = None if self.prediction is None else self.prediction.home
        return np.zeros(len(self.at), np.bool_) if lift is None else is_home(lift)

    def _homes_note(self) -> str | None:
        """Explain why a request's homes were ignored, or why it has none; None: they were applied."""
        if self.prediction is None:
            return UNKNOWN_MODEL
        request_prediction, versions = self.prediction.request, self.prediction.versions
        if self.prediction.home is None:
            waits = (
                []
                if versions is None
                else [f"{engine}'s wait for epoch {epoch}" for engine, (_, epoch) in versions.coming.items()]
            )
            return f"no cluster has a home{': ' if waits else ''}{', '.join(waits)}"
        if not self.rules.depends_on_experts:
            return (
                f"ignored: the policy {self.rules.policy} with its weights does not depend on expert"
                " placement"
            )
        if self.home is None:
            return (
                f"ignored: the prediction has a confidence of {request_prediction.confidence:.3f};"
                f" {self.rules.home_confidence:g} is required"
            )
        return (
            None
            if self.home.at.any()
            else "no rank is planned to get clearly more than its even share of such requests"
        )

    def _candidates(self, at: list[int]) -> list[Candidate]:
        """Return the records of these candidates, in this order."""
        prediction = self.prediction
        experts = [(None,) * 4] * len(at) if prediction is None else prediction.expert_load[:, at].T.tolist()
        columns = zip(
            at,
            self.score[at].tolist(),
            self.scores.terms[:, at].T.tolist(),
            self.load[:, at].T.tolist(),
            np.stack([self.overlap_blocks, self.uncached])[:, at].T.tolist(),
            experts,
            strict=True,
        )
        return [self._candidate(*column) for column in columns]

    def _candidate(
        self,
        at: int,
        score: float,
        terms: list[float],
        load: list[int],
        tokens: list[int],
        experts: "list[float] | tuple[None, ...]",
    ) -> Candidate:
        target = self.target_table.targets[int(self.at[at])]
        remote_ranks, remote_nodes, local, added = experts
        priced = self.prediction is not None and bool(self.prediction.priced[at])
        return Candidate(
            engine=target.engine.engine,
            rank=target.rank,
            worker_id=str(target.key[0]),
            score=score,
            terms_ms=Terms(**dict(zip(TERMS, self._known_terms(at, terms), strict=True))),
            speed=(
                "stated"
                if bool(self.target_table.stated[self.at[at]])
                else "measured"
                if self.is_measured(at)
                else "not measured"
            ),
            overlap_blocks=tokens[0],
            overlap_approximate=(
                self.ask.hashed == "text" or bool(self.target_table.approximate[self.at[at]])
            ),
            uncached_tokens=tokens[1],
            load=PromisedLoad(
                prefill_tokens=load[PREFILL], requests=load[SEQUENCES], blocks=load[BLOCKS], steps=load[STEPS]
            ),
            remote_ranks=remote_ranks if priced else None,
            remote_nodes=remote_nodes if priced else None,
            local_share=local if priced else None,
            added_experts=added,
            home_lift=(
                None
                if self.prediction is None or self.prediction.home is None
                else float(self.prediction.home[at])
            ),
            experts_note=self._note(at),
        )

    def _note(self, at: int) -> str | None:
        """Explain a missing expert term: reasons of the engine, or no useful prediction."""
        note = self.target_table.targets[int(self.at[at])].note
        if note is not None:
            return note
        if self.prediction is None:
            return UNKNOWN_MODEL
        if not self.prediction.priced[at]:
            return "not priced yet with the present clusters"
        return None if self.prediction.request.gain else NO_GAIN


def decide(
    ask: Ask,
    target_table: TargetTable,
    found: Candidates,
    overlap_blocks: NDArray[np.int64],
    conditions: Conditions,
    rules: PolicyRules,
    view_version: int,
    prediction: TargetPredictions | None = None,
) -> Decision:
    """Price every target and pick a candidate by the rules.

    overlap_blocks: int64 [targets]; prediction: for all targets. ValueError without any candidate.
    """
    at = found.at
    if not len(at):
        raise ValueError(
            f"decision {ask.decision_id}: no candidate among {len(target_table.targets)} ranks of the model"
            f" {ask.model!r}"
        )
    load = conditions.load
    uncached = uncached_tokens(ask.prompt_tokens, overlap_blocks, target_table.block_size)
    transfer: FloatArray | None = None
    if ask.prefill is not None and ask.fetches_kv:
        # the last token is always computed, because its logits are needed
        transfer = (uncached - 1).astype(np.float64) * ask.prefill.token_s
        uncached = np.ones_like(uncached)
    expected = None if prediction is None else prediction.expected
    scores = score(
        target_table,
        load,
        uncached,
        ask.prompt_tokens,
        ask.output_tokens,
        rules.weights,
        expected,
        conditions.switch_delay,
        conditions.factors,
        transfer,
    )
    if len(at) != len(uncached):
        scores, uncached, load, overlap_blocks = scores.of(at), uncached[at], load[:, at], overlap_blocks[at]
        prediction = None if prediction is None else prediction.of(at)
    measured = None if conditions.measured is None else columns(conditions.measured, at)
    remote = prediction.remote_share if prediction is not None and rules.policy == "classic" else None
    by, unit = scored(rules, CandidateFacts(scores, uncached, ask.prompt_tokens, remote, conditions.turn))
    held = None if conditions.held is None else _place(conditions.held, target_table, at)
    home = (
        None
        if prediction is None or prediction.home is None
        else _home(prediction, prediction.home, rules, scores, target_table, at, uncached, ask.output_tokens)
    )
    choice = choose(rules, by, unit, scores.total, scores.outstanding, ask.seed, held, home)
    return Decision(
        ask=ask,
        target_table=target_table,
        at=at,
        overlap_blocks=overlap_blocks,
        uncached=uncached,
        load=load,
        scores=scores,
        score=by,
        unit=unit,
        choice=choice,
        held=held,
        excluded=found.excluded,
        ignored=found.ignored,
        rules=rules,
        view_version=view_version,
        prediction=prediction,
        home=home,
        target=target_table.targets[int(at[choice.chosen])],
        measured=measured,
    )


def _home(
    prediction: TargetPredictions,
    lift: FloatArray,
    rules: PolicyRules,
    scores: Scores,
    target_table: TargetTable,
    at: NDArray[np.intp],
    uncached: NDArray[np.int64],
    output_tokens: int,
) -> HomeRanks | None:
    """Return the homes of a request; None: it has none, or they are ignored. The confidence of the request's
    own prediction decides if homes apply. It does not scale the expected saving: predicted weights are drawn
    towards the mix already, as far as evidence is missing. The calibration earned by past predictions does
    not count here, since prediction can earn nothing before placement and requests are aligned.

    Columns are those of the candidates `at`. Once prediction has earned a gain, the expert term gives the
    cost of sending the tokens.
    """
    if not rules.depends_on_experts:
        return None
    gain = prediction.request.gain
    if prediction.request.confidence < rules.home_confidence:
        return None
    worth = max(HOME_WORTH - gain, 0.0)
    if rules.policy != "cost" or not np.logical_and.reduce(prediction.priced):
        return HomeRanks(is_home(lift), None)
    if gain > _MIN_GAIN:
        return HomeRanks(is_home(lift), scores.ms("experts") * (-worth / gain))
    node_s = target_table.dispatch_node_s[at] if target_table.far else None
    costs = dispatch_seconds(
        target_table.dispatch_s[at],
        node_s,
        uncached + np.float64(output_tokens),
        *prediction.expert_load[:2],
    )
    return HomeRanks(is_home(lift), costs * (-1000.0 * worth * rules.weights.by_term["experts"]))


def _place(key: RankKey, target_table: TargetTable, at: NDArray[np.intp]) -> int | None:
    """Return the index of a rank among the candidates `at` (ascending), or None."""
    target = target_table.index.get(key)
    if target is None:
        return None
    place = int(at.searchsorted(target))
    return place if place < len(at) and at[place] == target else None
