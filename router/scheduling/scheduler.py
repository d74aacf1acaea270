"""Scheduler: decides where a request goes and books its load there. Synchronous: a decision uses what is
known now and awaits nothing.

State: the view, the reservations, the two prefix indices, the ranks' health, and the recent decisions.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray
from fleet.completions import ApiError
from router.admission.queue_policy import Saturated
from router.config import RouterConfig
from router.fleet_state.reservations import SEQUENCES, Booking, Reservations
from router.fleet_state.target_table import Excluded, RankKey, TargetTable
from router.fleet_state.view import FleetView
from router.health.attempt_failures import (
    AttemptFailure,
    ranks_to_avoid,
    ranks_with_other_weights,
)
from router.health.circuit_breakers import CircuitBreakers, Exclusions
from router.prediction.predictor import Predictor
from router.prefix_index.approximate_index import ApproximateIndex
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import KvEventIndex
from router.prefix_index.prompt import Prompt
from router.scheduling.batch_assignment import order_of
from router.scheduling.booking_observer import BookingObserver
from router.scheduling.cost import TERMS
from router.scheduling.decision import (
    Ask,
    Conditions,
    Decision,
    decide,
)
from router.scheduling.filters import Candidates, SaturationLimits, candidates, saturated
from router.scheduling.kept_decisions import BookedDecision, KeptDecisions
from router.scheduling.policies import PolicyRules
from router.scheduling.refusals import no_candidate, no_live_rank
from router.scheduling.request_exclusions import beside_health
from router.scheduling.routing_request import FIRST_TRY, Attempt, RoutingRequest
from router.scheduling.session_affinity import SessionAffinity
from router.scheduling.target_predictions import predicted
from router.scheduling.target_speeds import TargetSpeeds

NONE_BUSY: frozenset[RankKey] = frozenset()
_NONE_TO_AVOID = (NONE_BUSY,)
BUSY_SECONDS = 0.25
"""Time for which a rank that reports to be busy gets no requests."""

Lap = Callable[[str], None]
"""Called with the name of each part of a decision when that part is done."""


class Scheduler(BookingObserver):
    """`kv` indexes the blocks held by ranks with KV events; `prefixes` estimates them for the other ranks, in
    the same `block_index`. `predictor` predicts which experts a request activates.
    """

    def __init__(
        self,
        view: FleetView,
        reservations: Reservations,
        kv: KvEventIndex,
        prefixes: ApproximateIndex,
        config: RouterConfig,
    ) -> None:
        self.view = view
        self.reservations = reservations
        self.kv = kv
        self.prefixes = prefixes
        self.predictor = Predictor(config.prediction_bytes)
        self.health = CircuitBreakers(config)
        self.speeds = TargetSpeeds(config.correction_limit)
        self._config = config
        self._limits = SaturationLimits(
            config.max_requests_per_rank, config.max_queue_seconds, config.max_kv_share
        )
        self._rules = PolicyRules.of(config)
        self._affinity = SessionAffinity(config.session_affinity_seconds)
        self._busy_until: dict[RankKey, float] = {}
        """end of the time for which a rank that reported to be busy counts as saturated"""
        self._turns: dict[str, int] = {}
        """number of booked decisions by model"""
        self.kept = KeptDecisions(config.kept_decisions, config.kept_decisions_bytes)

    @classmethod
    def create(cls, config: RouterConfig) -> "Scheduler":
        """Return a scheduler of an empty fleet."""
        reservations = Reservations(
            settle_seconds=config.settle_seconds, stale_seconds=config.stale_load_seconds
        )
        block_index = BlockIndex()
        prefixes = ApproximateIndex(config.prefix_blocks_per_rank, block_index)
        return cls(FleetView(reservations), reservations, KvEventIndex(block_index), prefixes, config)

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply these settings from now on."""
        self._config = config
        self._limits = SaturationLimits(
            config.max_requests_per_rank, config.max_queue_seconds, config.max_kv_share
        )
        self._rules = PolicyRules.of(config)
        self._affinity.set_seconds(config.session_affinity_seconds)
        self.kept.reconfigure(config.kept_decisions, config.kept_decisions_bytes)
        self.health.reconfigure(config)
        self.speeds.reconfigure(config.correction_limit)
        self.reservations.reconfigure(
            settle_seconds=config.settle_seconds, stale_seconds=config.stale_load_seconds
        )

    @property
    def expected_steps_left(self) -> int:
        """Tokens still expected from a request known only to a rank: on average half of its output has
        come."""
        return -(-self._config.expected_output_tokens // 2)

    def target_table(self, model: str) -> TargetTable:
        """Return the ranks that may serve a model. ApiError 404 for an unknown model; Saturated (503) when
        none of its ranks is live.
        """
        target_table = self.view.target_table(model)
        if not target_table.targets:
            raise no_live_rank(target_table, self.view.models(live=False))
        return target_table

    def decide(
        self,
        need: RoutingRequest,
        decision_id: str,
        seed: int,
        now: float,
        attempt: Attempt = FIRST_TRY,
        lap: Lap | None = None,
    ) -> Decision:
        """Choose a rank. `lap` is called after each part. ApiError 404, 503 (no live engine, or all failed
        this request) or 429 (all saturated), the last two with Retry-After.
        """
        target_table = self.target_table(need.model)
        if target_table.sent_tokenizer != need.tokenizer:
            raise ApiError(
                503,
                "the remaining engines use another tokenizer; send the request again",
                code="upstream_failed",
                retry_after=1.0,
            )
        load = self.reservations.load(target_table.rows, now)
        found = self._candidates(target_table, load, need, attempt, now)
        if lap is not None:
            lap("filter")
        ask = Ask(
            decision_id=decision_id,
            seed=seed,
            model=need.model,
            prompt_tokens=need.prompt.tokens,
            output_tokens=need.output,
            attempt=attempt.number,
            replaces=attempt.replaces,
            cause=attempt.failures[-1][1].value if attempt.failures else None,
            request_id=need.request_id,
            keys=need.keys,
            supposed=need.supposed,
            owner=need.owner,
            hashed="ids" if need.prompt.ids else "text",
            prefill=need.prefill,
            trace_id=need.trace_id,
        )
        overlap = self.kv.block_index.overlap(target_table, need.prompt)
        if lap is not None:
            lap("overlap")
        prediction = predicted(self.predictor, self.view, target_table, need, overlap.longest)
        if lap is not None:
            lap("predict")
        known = self.speeds.known(target_table)
        held = self._session_rank(target_table, need.keys.session, now) if need.keys.session else None
        conditions = Conditions(
            load,
            self.view.handovers(target_table),
            known.factors,
            held,
            self._turns.get(need.model, 0),
            known.measured,
        )
        rules = self._rules_without(need.supposed.without) if need.supposed.without else self._rules
        decision = decide(
            ask, target_table, found, overlap.blocks, conditions, rules, self.view.version, prediction
        )
        if lap is not None:
            lap("score")
        return decision

    def _session_rank(self, target_table: TargetTable, session: int, now: float) -> RankKey | None:
        """Return the last rank of a session, or its engine if that is one target now; None: there is none."""
        rank = self._affinity.rank(session, now)
        return rank if rank is None or rank in target_table.index else (rank[0], 0)

    def places(self, model: str, now: float) -> int | None:
        """Return an upper bound on the further requests that the model's ranks accept before all are
        saturated; None: no rank is live.
        """
        target_table = self.view.target_table(model)
        if not target_table.targets:
            return None
        load, exclusions = (
            self.reservations.load(target_table.rows, now),
            self.health.exclusions(target_table, now),
        )
        full = self.saturated(target_table, load, now)
        free = np.where(full, 0, self._limits.max_requests(target_table) - load[SEQUENCES])
        for excluded in (exclusions.every, exclusions.hard):
            allowed = np.ones(len(free), np.bool_)
            allowed[[target_table.index[key] for key in excluded if key in target_table.index]] = False
            if allowed.any():
                return int(free[allowed].sum())
        return 0

    def saturated(self, target_table: TargetTable, load: IntArray, now: float) -> NDArray[np.bool_]:
        """Return the ranks that accept no further request, bool [targets]. load: int64 [AMOUNTS, targets]."""
        return saturated(
            target_table, load, self._limits, self._reported_busy(now), self.speeds.known(target_table).queue
        )

    def arranged(self, decisions: Sequence[Decision], now: float) -> list[int]:
        """Return the order in which to decide anew for requests that get their places together, given the
        decision for each alone. Requests without a place in this order are left out.
        """
        target_table = self.view.target_table(decisions[0].ask.model)
        if len(decisions) < 2 or any(decision.target_table is not target_table for decision in decisions):
            return list(range(len(decisions)))
        known = self.speeds.known(target_table)
        return order_of(
            decisions,
            self.reservations.load(target_table.rows, now),
            self._limits,
            known.factors,
            known.queue,
        )

    def book(
        self, decision: Decision, prompt: Prompt, now: float, *, external: bool = False, timed: bool = True
    ) -> Booking:
        """Add the request's load to the chosen rank, index the prompt if KV events will not, and keep the
        decision for reading back. external: another data plane sends the request. timed: the time of its
        first token will be known.
        """
        target, ask = decision.target, decision.ask
        size = target.engine.block_size
        blocks = -(-(ask.prompt_tokens + ask.output_tokens) // size)
        self.routed(decision, prompt)
        self.kept.add(BookedDecision(decision, now, decision.nbytes))
        self._turns[ask.model] = self._turns.get(ask.model, 0) + 1
        self._affinity.record_route(ask.keys.session, target.key, now)
        amounts = int(decision.uncached[decision.choice.chosen]), 1, blocks, ask.output_tokens
        booking = self.reservations.book(target.key, amounts, now, external=external)
        self.health.began(booking, target.key, _first_token_seconds(decision) if timed else None, now)
        return booking

    def routed(self, decision: Decision, prompt: Prompt) -> None:
        """Index the prompt at the chosen rank if KV events will not."""
        target = decision.target
        if not target.engine.capabilities.kv_events:
            chain = prompt.chained(target.engine.block_size)
            self.prefixes.routed(target.key, chain.reach(len(chain)), target.engine.kv_blocks or None)

    def first_token(self, booking: Booking, now: float) -> None:
        self.reservations.first_token(booking)
        self.health.first_token(booking, now)

    def prompt_computed(self, booking: Booking) -> None:
        self.reservations.first_token(booking)

    def emitted(self, booking: Booking, tokens: int, now: float) -> None:
        self.reservations.emitted(booking, tokens)

    def released(self, booking: Booking) -> None:
        self.reservations.release(booking)
        self.health.ended(booking)

    def eject_outliers(self, now: float) -> dict[tuple[str, int, int], str]:
        """Update outlier ejection for every group of ranks. Return the excluded ranks, as (model, worker_id,
        rank), with the kind of exclusion.
        """
        target_tables = [self.view.target_table(model) for model in self.view.models(live=True)]
        groups = dict.fromkeys(
            tuple(target.key for target in target_table.targets) for target_table in target_tables
        )  # models served by the same ranks are one group
        self.health.eject_outliers(list(groups), now)
        return {
            (target_table.model, *key): kind.value
            for target_table in target_tables
            for key, kind in self.health.exclusions(target_table, now).kinds.items()
        }

    def record_route(self, rank: RankKey, session: int, prefix: Sequence[int], now: float) -> None:
        """Record a request that another router sent to a rank. session: 0 for none. prefix: the first blocks
        of its prompt; empty if KV events will report them.
        """
        state = self.view.engine(rank[0])
        if prefix and state is not None and not state.joined.capabilities.kv_events:
            self.prefixes.routed(rank, prefix, state.joined.kv_blocks or None)
        self._affinity.record_route(session, rank, now)

    def _rules_without(self, terms: tuple[str, ...]) -> PolicyRules:
        if self._rules.policy != "cost":
            message = f"the policy {self._rules.policy} has no terms to leave out; only the policy cost has"
            raise ApiError(400, message, param="without", code="invalid_value")
        return self._rules.without(terms)

    def forget_worker(self, worker_id: int) -> None:
        """Drop an incarnation that has left."""
        self.kv.remove_worker(worker_id)
        self.prefixes.forget_worker(worker_id)
        self._affinity.forget_worker(worker_id)
        models = self.view.models(live=False)
        self._turns = {model: turn for model, turn in self._turns.items() if model in models}
        self.health.forget_worker(worker_id)
        self.speeds.forget_worker(worker_id)
        self._busy_until = {key: until for key, until in self._busy_until.items() if key[0] != worker_id}

    def attention_changed(self, worker_id: int) -> None:
        """Drop what is known of the ranks of an engine whose attention has changed: its requests and their
        KV are on other ranks now, or on all. Sessions stay with an engine that is one target."""
        state = self.view.engine(worker_id)
        if state is None or state.layout is None or state.layout.targets_are_ranks:
            self._affinity.forget_worker(worker_id)
        self.speeds.forget_worker(worker_id)
        self._busy_until = {key: until for key, until in self._busy_until.items() if key[0] != worker_id}

    def reported_busy(self, rank: RankKey, now: float) -> None:
        """Mark a rank as saturated for a moment after it refused a request as busy, regardless of its known
        load.
        """
        self._busy_until[rank] = now + BUSY_SECONDS

    def _reported_busy(self, now: float) -> frozenset[RankKey]:
        self._busy_until = {key: until for key, until in self._busy_until.items() if until > now}
        return frozenset(self._busy_until)

    def _candidates(
        self,
        target_table: TargetTable,
        load: NDArray[np.int64],
        need: RoutingRequest,
        attempt: Attempt,
        now: float,
    ) -> Candidates:
        """Return the candidates. Breakers and ejections are ignored if no other rank is left; drains never
        are.
        """
        exclusions = beside_health(self.health.exclusions(target_table, now), target_table, need)
        others = {} if need.begun is None else ranks_with_other_weights(need.begun, target_table)
        if others:
            exclusions = exclusions.beside(others)
        avoided: Sequence[frozenset[RankKey]] = _NONE_TO_AVOID
        if attempt.failures:
            failed = [failure for failure in attempt.failures if failure[1] is not AttemptFailure.BUSY]
            avoided = ranks_to_avoid(failed, target_table)
        reported_busy = self._reported_busy(now) if self._busy_until else NONE_BUSY
        prices = self.speeds.known(target_table).queue
        busy: Candidates | None = None
        some_soft = len(exclusions.every) > len(exclusions.hard)
        for excluded in (exclusions.every, exclusions.hard) if some_soft else (exclusions.every,):
            for avoid in avoided:
                found = candidates(
                    target_table, load, need.context, self._limits, avoid, excluded, reported_busy, prices
                )
                if len(found.at) and excluded is exclusions.every:
                    return found
                if len(found.at):
                    return msgspec.structs.replace(found, ignored=_ignored(target_table, exclusions))
                busy = found if found.busy else busy
            if busy is not None:
                raise Saturated(
                    429,
                    "every rank that serves this model is saturated; try again later",
                    code="saturated",
                    retry_after=max(1.0, busy.wait_seconds),
                )
        raise no_candidate(target_table, need.model, attempt, exclusions, others)


def _ignored(target_table: TargetTable, exclusions: Exclusions) -> tuple[Excluded, ...]:
    """Return the ranks that would have been excluded if others were left."""
    soft = [
        target
        for target in target_table.targets
        if target.key in exclusions.every and target.key not in exclusions.hard
    ]
    return tuple(Excluded(target.engine.engine, target.rank, exclusions.every[target.key]) for target in soft)


_FIRST_TOKEN_TERMS = ("prefill", "queue")


def _first_token_seconds(decision: Decision) -> float | None:
    """Return the expected seconds to the chosen rank's first token; None if a weight of 0 hides them, or the
    speed is unknown.
    """
    if not decision.is_measured(decision.chosen):
        return None
    weights = [decision.weights.by_term[term] for term in _FIRST_TOKEN_TERMS]
    if not all(weights):
        return None
    terms = [decision.scores.terms.item(TERMS.index(term), decision.chosen) for term in _FIRST_TOKEN_TERMS]
    return sum(ms / weight for ms, weight in zip(terms, weights, strict=True)) / 1000.0
