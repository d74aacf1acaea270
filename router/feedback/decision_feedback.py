"""What became of decisions: how fast engines really are, what was regretted, and which experts running requests make engines read.

`booked`, `first_token`, `emitted`, `released` and `reported` are for the hot path and only note; everything else is done every
TICK_SECONDS. One decision per tick is looked at again, so that hindsight costs the same at any rate of requests.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from bus import Bus
from bus.protocol.subjects import Subjects
from fleet.events import EngineJoined, KvMetrics, RequestProfile, RequestsProfiled
from fleet.signatures import PACKED, unpack
from router.evaluation.distinct_experts import MixShare
from router.evaluation.expected_latency import ExpectedStepTime, first_token, step
from router.evaluation.regret import Probe, Truth, WaitingProbes, regret_ms
from router.feedback.active_cluster_mix import ActiveClusterMix
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import REFERENCE
from router.scheduling.decision import Decision
from router.scheduling.scheduler import Scheduler
from router.telemetry.metrics import RankNow, RouterMetrics

TICK_SECONDS = 0.25
PROBE_BYTES = 16 * 1024 * 1024
"""of decisions that wait for what their requests did; the oldest are re-priced without it"""
PROBE_SECONDS = 120.0
"""A decision whose request has told nothing for so long is re-priced without it."""
_PROFILES_WAITING = 64
_PROFILE_PAUSE_SECONDS = 0.02
"""Between two messages of what requests activated: more than 50 a second are dropped unread."""
_A_FEW_TOKENS = 16.0
"""So many tokens' times count as one observation of a step."""


def _pool(engine: EngineJoined) -> str | None:
    """The base model of an engine that states no speed, which is learnt together with its like; None: it states one."""
    return None if engine.speed is not None else engine.model


class _Watched:
    """One open booking that was made here."""

    __slots__ = ("decision", "share", "told_at", "undisturbed")

    def __init__(self, decision: Decision, share: MixShare | None, *, waited: bool) -> None:
        self.decision = decision
        self.undisturbed = decision.ask.attempt == 1 and not waited
        """a first attempt that got its place at once: its first token's time says something of its rank"""
        self.share = share
        self.told_at: float | None = None
        """when tokens came last, seconds on the router's clock; None: none has come"""


class DecisionFeedback:
    """State: open bookings, the paces of engines, probes. `bus` None: nobody tells what requests did."""

    def __init__(
        self, picker: Scheduler, metrics: RouterMetrics, threads: ThreadPoolExecutor, clock: Callable[[], float], bus: Bus | None, subjects: Subjects
    ) -> None:
        self._picker = picker
        self._view = picker.view
        self._metrics = metrics
        self._clock = clock
        self._bus = bus
        self._subjects = subjects
        self._mixing = ActiveClusterMix(picker.view, picker.reservations, threads)
        self._open: dict[Booking, _Watched] = {}
        self._paces: dict[int, ExpectedStepTime] = {}
        """of engines that report how long their steps take"""
        self._waiting = WaitingProbes(PROBE_BYTES)
        self._probe: Probe | None = None
        """the decision that reports are watched for; None: the next one is"""
        metrics.ranks = self._ranks

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick(), name="looks back at decisions")
            if self._bus is not None:
                tasks.create_task(self._listen(self._bus), name="listens to what requests activated")

    @property
    def watched(self) -> int:
        """Open bookings that were made here."""
        return len(self._open)

    def worker(self, booking: Booking) -> int | None:
        """worker_id that an open booking of this router is at; None: the booking is over, or another router's."""
        watched = self._open.get(booking)
        return None if watched is None else watched.decision.target.key[0]

    def expected_first_token(self, decision: Decision) -> float:
        """Seconds from a decision to its first token at the chosen rank. A guess where its speed is neither stated nor measured: good
        for saying when a prompt may count as computed, not for showing or refusing."""
        expected, (prefill, decode) = first_token(decision, self._mixing.surcharge(decision.target.key[0])), self._factors(decision)
        return prefill * expected.prefill + decode * expected.beside

    # What happens to requests

    def booked(self, decision: Decision, booking: Booking, *, waited: bool = False) -> None:
        """waited: it did, for a place; what its rank is at then is hardly what is known of it."""
        self._open[booking] = _Watched(decision, self._mixing.booked(decision), waited=waited)
        if self._probe is None:
            self._probe = self._look_at(decision, booking.booked_at)

    def first_token(self, booking: Booking, now: float) -> None:
        """The first token came."""
        watched = self._open.get(booking)
        if watched is None or watched.told_at is not None:
            return
        watched.told_at = now
        decision = watched.decision
        if watched.undisturbed and self._known(decision):
            surcharge = self._mixing.surcharge(decision.target.key[0])
            expected, observed = first_token(decision, surcharge), now - booking.booked_at
            prefill, decode = self._factors(decision)
            if decision.is_measured(decision.chosen):
                self._metrics.first_token(decision.ask.model, prefill * expected.prefill + decode * expected.beside, observed)
            self._picker.speeds.prefilled(decision.target, self._row(decision), expected.prefill, decode * expected.beside, observed)

    def emitted(self, booking: Booking, tokens: int, now: float) -> None:
        """So many tokens came since this was said last. Tells the speed of engines that do not report it themselves."""
        watched = self._open.get(booking)
        if watched is None or watched.decision.target.key[0] in self._paces:
            return
        if watched.told_at is not None and tokens > 0 and self._known(watched.decision):
            decision, seconds = watched.decision, (now - watched.told_at) / tokens
            expected = step(decision, self._mixing.surcharge(decision.target.key[0]))
            weight, engine = min(tokens / _A_FEW_TOKENS, 1.0), decision.target.engine
            self._picker.speeds.stepped(decision.target.key, self._row(decision), expected, seconds, weight, pool=_pool(engine))
        watched.told_at = now

    def released(self, booking: Booking) -> None:
        watched = self._open.pop(booking, None)
        if watched is not None and watched.share is not None:
            watched.share.end()

    def reported(self, load: KvMetrics) -> None:
        """A rank's own word. ValueError when its steps take no time or for ever."""
        seconds = load.step_seconds
        state = self._view.engine(load.worker_id)
        if seconds is None or state is None or not 0 <= load.dp_rank < len(state.rows):
            return
        if not 0 < seconds < math.inf:
            raise ValueError(f"worker {load.worker_id} rank {load.dp_rank} reports steps of {seconds} s")
        pace = self._paces.get(load.worker_id)
        if pace is None:
            pace = self._paces[load.worker_id] = ExpectedStepTime(state.joined.speed or REFERENCE, len(state.rows))
        predicted = pace.reported(load.dp_rank, load.running or 0, load.active_decode_blocks or 0, self._mixing.surcharge(load.worker_id))
        if not load.running:
            return  # the steps were those of a load that is over
        self._picker.speeds.stepped((load.worker_id, load.dp_rank), state.rows[load.dp_rank], predicted, seconds, pool=_pool(state.joined))

    def forget_worker(self, worker_id: int) -> None:
        """An incarnation is gone for good."""
        self._paces.pop(worker_id, None)
        self._mixing.forget_worker(worker_id)

    # What is done every now and then

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            self._picker.speeds.refresh(now)
            self._look_back(now)
            await self._mixing.refresh(now)
            await asyncio.sleep(TICK_SECONDS)

    def _look_at(self, decision: Decision, now: float) -> Probe | None:
        """None: the house has changed since it was decided. The load of ranks that were no candidates is that of now."""
        roster = decision.roster
        if self._view.roster(decision.ask.model) is not roster or decision.measured is not None:
            return None  # regret is counted in milliseconds
        load = self._picker.reservations.load(roster.rows, now)
        load[:, decision.at] = decision.load
        self._picker.reservations.watch()
        return Probe(decision, self._view.prices(decision.ask.model), load, now)

    def _look_back(self, now: float) -> None:
        """Once reports had the time to come, it is known by how much they differ from what was believed when the probe was decided."""
        probe = self._probe
        if probe is not None and now - probe.made_at >= TICK_SECONDS:
            self._probe = None
            rows, engine = probe.decision.roster.rows, probe.decision.target.engine
            load = (probe.load + self._picker.reservations.surprise(rows)).clip(0)
            probe = probe._replace(load=load, factors=self._picker.speeds.known(probe.decision.roster).factors)
            if self._bus is not None and engine.shape is not None and engine.capabilities.experts:
                self._waiting.add(probe)
            else:
                self._settle(probe)
        for late in self._waiting.over(now - PROBE_SECONDS):
            self._settle(late)

    def _settle(self, probe: Probe, profile: RequestProfile | None = None, clusters: int = 0) -> None:
        decision, outlook = probe.decision, probe.decision.outlook
        truth = Truth(probe.load, probe.factors)
        if profile is not None:
            if outlook is not None and outlook.forecast.clusters == clusters and len(profile.signature) == PACKED:
                truth = truth._replace(weights=unpack(profile.signature, outlook.forecast.shares))
            if 0 <= profile.cached_tokens <= decision.ask.prompt_tokens:
                truth = truth._replace(cached_tokens=profile.cached_tokens)
        self._metrics.regret(decision.ask.model, regret_ms(decision, truth, probe.prices) / 1000.0)

    # What ranks tell of requests

    async def _listen(self, bus: Bus) -> None:
        async with bus.subscribe(self._subjects.requests_profiled(), self._subjects.requests_read, limit=_PROFILES_WAITING) as said:
            dropped = 0
            async for received in said:
                if isinstance(received.message, RequestsProfiled):
                    self._profiled(received.message)
                else:
                    self._metrics.bus_refused.inc()
                self._metrics.profiled("unread", said.dropped - dropped)
                dropped = said.dropped
                await asyncio.sleep(_PROFILE_PAUSE_SECONDS)

    def _profiled(self, message: RequestsProfiled) -> None:
        for profile in message.requests:
            decision = self._picker.kept(profile.decision)
            if decision is None or decision.target.key[0] != message.worker_id:
                self._metrics.profiled("unknown")
                continue
            self._metrics.profiled("ours")
            outlook, at = decision.outlook, decision.chosen
            if outlook is not None and outlook.priced[at] and profile.local is not None and 0 <= profile.local <= 1:
                heaviest = int(outlook.forecast.weights.argmax())
                self._metrics.locality(decision.ask.model, heaviest, float(outlook.local[at]), profile.local)
            probe = self._waiting.take(profile.decision)
            if probe is not None:
                self._settle(probe, profile, message.clusters)

    def _known(self, decision: Decision) -> bool:
        """Whether its engine is not forgotten yet: afterwards its row may be another's."""
        return self._view.engine(decision.target.key[0]) is not None

    def _factors(self, decision: Decision) -> tuple[float, float]:
        """Of the chosen rank's predicted prefill and decode seconds, by what is known now."""
        roster, key = self._view.roster(decision.ask.model), decision.target.key
        if key in roster.index:
            return self._picker.speeds.of(roster, roster.index[key])
        return 1.0, 1.0

    def _row(self, decision: Decision) -> int:
        return int(decision.roster.rows[decision.at[decision.chosen]])

    def _ranks(self) -> Iterator[RankNow]:
        """Every rank that can be chosen, as it stands, once: under its base model where it serves several."""
        now = self._clock()
        for model in self._view.models(live=True):
            roster = self._view.roster(model)
            loads = self._picker.reservations.load(roster.rows, now).T.tolist()
            for at, (target, load) in enumerate(zip(roster.targets, loads, strict=True)):
                if target.engine.model == model:
                    yield RankNow(model, *target.key, tuple(load), *self._picker.speeds.of(roster, at), stated=target.engine.speed is not None)
