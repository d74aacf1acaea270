"""Feedback on decisions: the measured speed of engines, the regret of choices, and the experts that running
requests make engines read.

`booked`, `first_token`, `emitted`, `released` and `reported` are for the hot path and only take notes; the
rest runs every TICK_SECONDS. One decision per tick is evaluated, so that the cost is the same at any request
rate.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator

from bus import Bus
from fleet.facts.activity import RequestProfile, RequestsProfiled
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineJoined
from fleet.signatures import PACKED, unpack
from fleet.timing import EngineSpeed
from router.context import RouterContext
from router.evaluation.distinct_experts import MixShare
from router.evaluation.expected_latency import ExpectedStepTime, first_token, step
from router.evaluation.regret import Probe, Truth, WaitingProbes, regret_ms
from router.feedback.active_cluster_mix import ActiveClusterMix
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import RankKey
from router.scheduling.booking_observer import BookedRequest, BookingObserver
from router.scheduling.decision import Decision
from router.telemetry.metrics import RankNow

TICK_SECONDS = 0.25
PROBE_BYTES = 16 * 1024 * 1024
"""memory of decisions that wait for the profile of their request; the oldest are re-priced without it"""
PROBE_SECONDS = 120.0
"""Timeout for the profile of a request. Its decision is then re-priced without it."""
_PROFILES_WAITING = 64
_PROFILE_PAUSE_SECONDS = 0.02
"""Pause between two messages of request profiles: more than 50 a second are dropped unread."""
LEARNT_OF_A_RANK = 8
"""First tokens of one rank learnt from per tick. A speed follows from the last 32, so more teach a busy
router nothing, and would cost every request 3 percent.
"""
_LEARNT_AT_ONCE = 32
"""First tokens learnt from in one turn of the event loop: about a millisecond."""
_A_FEW_TOKENS = 16.0
"""Tokens whose times count as one full observation of a step."""


def _pool(engine: EngineJoined, stated: EngineSpeed | None) -> str | None:
    """Return the base model of an engine without a stated speed: engines of one model are measured together.
    None: the engine states a speed.
    """
    return engine.model if stated is None else None


class _Watched:
    """One open booking of this router."""

    __slots__ = ("decision", "last_at", "share", "undisturbed")

    def __init__(self, decision: Decision, share: MixShare | None, *, waited: bool) -> None:
        self.decision = decision
        self.undisturbed = decision.ask.attempt == 1 and not waited and not decision.ask.fetches_kv
        """a first attempt that was admitted at once and computed its prompt: its time to first token
        characterises its rank
        """
        self.share = share
        self.last_at: float | None = None
        """time of the last tokens, seconds on the router's clock; None: none arrived yet"""


class DecisionFeedback(BookingObserver):
    """State: open bookings, step times of engines, probes. bus None: no request profiles arrive."""

    def __init__(self, bus: Bus | None, context: RouterContext, served: Callable[[int], None]) -> None:
        """served: called with the worker_id of a rank that sent tokens."""
        self._scheduler = context.scheduler
        self._view = context.scheduler.view
        self._metrics = context.metrics
        self._clock = context.clock
        self._bus = bus
        self._subjects = context.subjects
        self._served = served
        self._mixing = ActiveClusterMix(self._view, context.scheduler.reservations, context.threads)
        self._open: dict[Booking, _Watched] = {}
        self._step_times: dict[int, ExpectedStepTime] = {}
        """for engines that report their step times"""
        self._first_tokens: deque[tuple[Decision, float]] = deque()
        """decisions whose first token came, and the seconds that it took"""
        self._noted: Counter[RankKey] = Counter()
        """first tokens noted since the last tick, by rank"""
        self._waiting = WaitingProbes(PROBE_BYTES)
        self._probe: Probe | None = None
        """the decision whose load reports are being collected; None: the next decision is taken"""
        context.metrics.ranks = self._ranks

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick(), name="evaluates decisions")
            if self._bus is not None:
                tasks.create_task(self._listen(self._bus), name="receives request profiles")

    @property
    def watched(self) -> int:
        """Number of open bookings of this router."""
        return len(self._open)

    def expected_first_token(self, decision: Decision) -> float:
        """Return the expected seconds from a decision to its first token at the chosen rank.

        A rough guess if the speed is neither stated nor measured: good enough for when a prompt counts as
        computed, but not for display or refusal.
        """
        expected, (prefill, decode) = (
            first_token(decision, self._mixing.surcharge(decision.target.key[0])),
            self._factors(decision),
        )
        return prefill * expected.prefill + decode * expected.beside

    # Events of requests

    def booked(self, booked: BookedRequest) -> None:
        decision, booking = booked.decision, booked.booking
        self._open[booking] = _Watched(decision, self._mixing.booked(decision), waited=booked.waited)
        if self._probe is None:
            self._probe = self._look_at(decision, booking.booked_at)

    def first_token(self, booking: Booking, now: float) -> None:
        """Record the first token, and note its time for the speed of prefill."""
        watched = self._open.get(booking)
        if watched is None:
            return
        key = watched.decision.target.key
        self._served(key[0])
        if watched.last_at is not None:
            return
        watched.last_at = now
        if watched.undisturbed and self._noted[key] < LEARNT_OF_A_RANK:
            self._noted[key] += 1
            self._first_tokens.append((watched.decision, now - booking.booked_at))

    def emitted(self, booking: Booking, tokens: int, now: float) -> None:
        """Record tokens that arrived since the last call. This measures the speed of engines that do not
        report it.
        """
        watched = self._open.get(booking)
        if watched is None:
            return
        worker_id = watched.decision.target.key[0]
        self._served(worker_id)
        if worker_id in self._step_times:
            return
        if watched.last_at is not None and tokens > 0 and self._known(watched.decision):
            decision, seconds = watched.decision, (now - watched.last_at) / tokens
            expected = step(decision, self._mixing.surcharge(decision.target.key[0]))
            weight, target = min(tokens / _A_FEW_TOKENS, 1.0), decision.target
            pool = _pool(target.engine, target.stated_speed)
            self._scheduler.speeds.stepped(
                target.key, self._row(decision), expected, seconds, weight, pool=pool
            )
        watched.last_at = now

    def released(self, booking: Booking) -> None:
        watched = self._open.pop(booking, None)
        if watched is not None and watched.share is not None:
            watched.share.end()

    def learn(self) -> bool:
        """Update the speed of prefill by the first tokens noted, a few at a time; True when there are more.
        No request waits for it, since new speeds hold from the next tick on.
        """
        for _ in range(min(len(self._first_tokens), _LEARNT_AT_ONCE)):
            self._learn_from(*self._first_tokens.popleft())
        if not self._first_tokens:
            self._noted.clear()
        return bool(self._first_tokens)

    def reported(self, load: KvMetrics) -> None:
        """Record the load report of a rank. ValueError when its step time is not positive and finite."""
        seconds = load.step_seconds
        state = self._view.engine(load.worker_id)
        if seconds is None or state is None or not 0 <= load.dp_rank < len(state.rows):
            return
        if not 0 < seconds < math.inf:
            raise ValueError(f"worker {load.worker_id} rank {load.dp_rank} reports steps of {seconds} s")
        step_times = self._step_times.get(load.worker_id)
        if step_times is None or step_times.speed != state.speed:
            step_times = self._step_times[load.worker_id] = ExpectedStepTime(state.speed, len(state.rows))
        predicted = step_times.reported(
            load.dp_rank,
            load.running or 0,
            load.active_decode_blocks or 0,
            self._mixing.surcharge(load.worker_id),
        )
        if not load.running:
            return  # the step times belong to a load that has ended
        self._scheduler.speeds.stepped(
            (load.worker_id, load.dp_rank),
            state.rows[load.dp_rank],
            predicted,
            seconds,
            pool=_pool(state.joined, state.stated_speed),
        )

    def forget_worker(self, worker_id: int) -> None:
        """Drop the state of an incarnation that will not return."""
        self._step_times.pop(worker_id, None)
        self._mixing.forget_worker(worker_id)

    # Periodic work

    async def _tick(self) -> None:
        while True:
            while self.learn():  # noqa: ASYNC110 other tasks run in between
                await asyncio.sleep(0)
            now = self._clock()
            self._scheduler.speeds.refresh(now)
            self._look_back(now)
            await self._mixing.refresh(now)
            await asyncio.sleep(TICK_SECONDS)

    def _learn_from(self, decision: Decision, observed: float) -> None:
        if not self._known(decision):
            return
        expected = first_token(decision, self._mixing.surcharge(decision.target.key[0]))
        prefill, decode = self._factors(decision)
        if decision.is_measured(decision.chosen):
            self._metrics.first_token(
                decision.ask.model, prefill * expected.prefill + decode * expected.beside, observed
            )
        self._scheduler.speeds.prefilled(
            decision.target, self._row(decision), expected.prefill, decode * expected.beside, observed
        )

    def _look_at(self, decision: Decision, now: float) -> Probe | None:
        """Make a probe of a decision; None: its ranks have changed since. The load of ranks that were no
        candidates is the present one.
        """
        target_table = decision.target_table
        if self._view.target_table(decision.ask.model) is not target_table or decision.measured is not None:
            return None  # only costs in milliseconds have a regret
        if decision.ask.fetches_kv:
            return None  # repricing knows no transfers
        load = self._scheduler.reservations.load(target_table.rows, now)
        load[:, decision.at] = decision.load
        self._scheduler.reservations.watch()
        return Probe(decision, self._view.prices(decision.ask.model), load, now)

    def _look_back(self, now: float) -> None:
        """Correct the probe's load. By now load reports have arrived, and show the error of the load assumed
        at the decision.
        """
        probe = self._probe
        if probe is not None and now - probe.made_at >= TICK_SECONDS:
            self._probe = None
            rows, engine = probe.decision.target_table.rows, probe.decision.target.engine
            load = (probe.load + self._scheduler.reservations.load_error(rows)).clip(0)
            probe = probe._replace(
                load=load, factors=self._scheduler.speeds.known(probe.decision.target_table).factors
            )
            if self._bus is not None and engine.shape is not None and engine.capabilities.experts:
                self._waiting.add(probe)
            else:
                self._settle(probe)
        for late in self._waiting.over(now - PROBE_SECONDS):
            self._settle(late)

    def _settle(self, probe: Probe, profile: RequestProfile | None = None, clusters: int = 0) -> None:
        decision, prediction = probe.decision, probe.decision.prediction
        truth = Truth(probe.load, probe.factors)
        if profile is not None:
            if (
                prediction is not None
                and prediction.request.clusters == clusters
                and len(profile.signature) == PACKED
            ):
                truth = truth._replace(weights=unpack(profile.signature, prediction.request.shares))
            if 0 <= profile.cached_tokens <= decision.ask.prompt_tokens:
                truth = truth._replace(cached_tokens=profile.cached_tokens)
        self._metrics.regret(decision.ask.model, regret_ms(decision, truth, probe.prices) / 1000.0)

    # Request profiles from ranks

    async def _listen(self, bus: Bus) -> None:
        async with bus.subscribe(
            self._subjects.requests_profiled(), self._subjects.requests_read, limit=_PROFILES_WAITING
        ) as subscription:
            dropped = 0
            async for received in subscription:
                if isinstance(received.message, RequestsProfiled):
                    self._profiled(received.message)
                else:
                    self._metrics.bus_refused.inc()
                self._metrics.profiled("unread", subscription.dropped - dropped)
                dropped = subscription.dropped
                await asyncio.sleep(_PROFILE_PAUSE_SECONDS)

    def _profiled(self, message: RequestsProfiled) -> None:
        for profile in message.requests:
            decision = self._scheduler.kept.get(profile.decision)
            if decision is None or decision.target.key[0] != message.worker_id:
                self._metrics.profiled("unknown")
                continue
            self._metrics.profiled("ours")
            prediction, at = decision.prediction, decision.chosen
            if (
                prediction is not None
                and prediction.priced[at]
                and profile.local is not None
                and 0 <= profile.local <= 1
            ):
                heaviest = int(prediction.request.weights.argmax())
                self._metrics.locality(
                    decision.ask.model, heaviest, float(prediction.local[at]), profile.local
                )
            probe = self._waiting.take(profile.decision)
            if probe is not None:
                self._settle(probe, profile, message.clusters)

    def _known(self, decision: Decision) -> bool:
        """True until the engine is forgotten: afterwards its row may belong to another engine."""
        return self._view.engine(decision.target.key[0]) is not None

    def _factors(self, decision: Decision) -> tuple[float, float]:
        """Return the present factors of the chosen rank's predicted prefill and decode seconds."""
        target_table, key = self._view.target_table(decision.ask.model), decision.target.key
        if key in target_table.index:
            return self._scheduler.speeds.of(target_table, target_table.index[key])
        return 1.0, 1.0

    def _row(self, decision: Decision) -> int:
        return int(decision.target_table.rows[decision.at[decision.chosen]])

    def _ranks(self) -> Iterator[RankNow]:
        """Yield the state of every rank that can be chosen, once: under its base model if it serves
        several."""
        now = self._clock()
        for model in self._view.models(live=True):
            target_table = self._view.target_table(model)
            loads = self._scheduler.reservations.load(target_table.rows, now).T.tolist()
            for at, (target, load) in enumerate(zip(target_table.targets, loads, strict=True)):
                if target.engine.model == model:
                    yield RankNow(
                        model,
                        *target.key,
                        tuple(load),
                        *self._scheduler.speeds.of(target_table, at),
                        stated=target.stated_speed is not None,
                    )
