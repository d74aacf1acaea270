"""The router as one object: its state, its background work, and the synchronous face that requests are served with."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from bus import Bus
from bus.subjects import Subjects
from router.config import RouterConfig
from router.course import Failure
from router.decision import Decision
from router.exchange import Exchange
from router.feeds import Feeds
from router.foreign_reports import ForeignReports
from router.foreign_routings import Tap, Usage
from router.holders import Holders
from router.kv_index import KvIndex
from router.lexicon import Lexicon
from router.metrics import RouterMetrics
from router.outcomes import Outcomes
from router.picker import FIRST_TRY, Need, Picker, Try
from router.plain import PlainBackends
from router.prefixes import Prefixes
from router.prompt import Prompt
from router.proxy import Upstream
from router.reservations import Booking, Reservations
from router.tokenizer import ModelTokenizer
from router.view import View

log = logging.getLogger(__name__)

WHOLE_EVENTS = 16
"""A plain server's whole answer may be as long as so many of the longest events; so may what it says of experts."""
_SWEEP_SECONDS = 0.25
_PROBES_MISSED = 2.5
"""A plain backend counts as silent after so many probe intervals."""


class RouterService:
    """`run` keeps the view fresh until it is cancelled; everything else is synchronous. `bus` None: plain backends only."""

    def __init__(
        self,
        bus: Bus | None,
        subjects: Subjects,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """OSError when the backends' key file cannot be read."""
        self.config = config
        self.clock = clock
        self.started_at = int(time.time())
        self.metrics = RouterMetrics()
        self.upstream = Upstream(config)
        self.backend_key = None if config.backend_key_file is None else config.backend_key_file.read_text(encoding="utf-8").split("\n")[0].strip()
        self._chance = random.Random() if chance is None else chance
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="roost-router")
        reservations = Reservations(settle_seconds=config.settle_seconds, stale_seconds=config.stale_load_seconds)
        self.view = View(reservations)
        holders = Holders()
        self.picker = Picker(self.view, reservations, KvIndex(holders), Prefixes(config.prefix_blocks_per_rank, holders), config)
        self.lexicon = Lexicon(self.threads, self._tokenizer_changed, config.segment_cache_bytes)
        self.feeds = None if bus is None else Feeds(bus, subjects, self.picker, self.lexicon, self.metrics, self.threads, clock, self.forget_worker)
        self._outcomes = None if bus is None else Outcomes(bus, subjects, self.metrics, seconds=config.outcome_seconds, most=config.most_outcomes_waiting)
        most = WHOLE_EVENTS * config.max_event_bytes
        self._foreign = None if bus is None else ForeignReports(bus, subjects, self.view, self.metrics, self.threads, most)
        self._backends = PlainBackends(config.backends, self.backend_key, self.view, clock, self.forget_worker)

    @property
    def ready(self) -> bool:
        """Whether at least one engine lives and can be used."""
        return bool(self.view.models(live=True))

    async def run(self) -> None:
        """Listen, probe and sweep until cancelled."""
        async with AsyncExitStack() as stack:
            stack.callback(self.threads.shutdown, wait=False, cancel_futures=True)
            await stack.enter_async_context(self.upstream)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            if self.feeds is not None:
                tasks.create_task(self.feeds.run(), name="listens to the bus")
            if self._outcomes is not None:
                tasks.create_task(self._outcomes.run(), name="tells the tracker what became of requests")
            if self._foreign is not None:
                tasks.create_task(self._foreign.run(), name="tells the tracker what foreign engines activated")
            if self.config.backends:
                tasks.create_task(self._backends.run(self.upstream, self.config.probe_seconds), name="probes plain backends")
            tasks.create_task(self._sweep(), name="declares silent engines dead")

    # What requests are served with

    def new_decision_id(self) -> str:
        return f"{self._chance.getrandbits(64):016x}"

    def draw_seed(self) -> int:
        """For a request that names none: its sampling must be repeatable by the rank that continues it."""
        return self._chance.getrandbits(63)

    def decide(self, need: Need, decision_id: str, attempt: Try = FIRST_TRY) -> Decision:
        """Without booking anything. ApiError as `Picker.decide` says."""
        return self.picker.decide(need, decision_id, self._chance.getrandbits(32), self.clock(), attempt)

    def book(self, exchange: Exchange, need: Need, suffix: str, attempt: Try) -> tuple[Decision, Booking]:
        """Decide, promise the chosen rank the load at once, and write the decision's span."""
        started = time.perf_counter()
        decision = self.decide(need, exchange.decision_id + suffix, attempt)
        booking = self.picker.book(decision, need.prompt, self.clock())
        seconds = time.perf_counter() - started
        self.metrics.decided(decision, seconds)
        if exchange.trace is not None:
            now = time.time_ns()
            exchange.trace.decided(decision, now - int(1e9 * seconds), now)
        return decision, booking

    def first_token(self, booking: Booking) -> None:
        self.picker.reservations.first_token(booking)

    def release(self, booking: Booking) -> None:
        self.picker.reservations.release(booking)

    def finished(self, decision: Decision, prompt: Prompt, *, reported: bool = False) -> None:
        """A choice was answered to its end by this decision's rank; `prompt` is what was decided on. reported: the answer named its experts."""
        if self._outcomes is not None:
            self._outcomes.note(decision, prompt, reported=reported)

    def tap(self, decision: Decision) -> Tap | None:
        """What listens for experts in the answer of an engine that does not report them itself."""
        return None if self._foreign is None else self._foreign.tap(decision)

    def routed(self, decision: Decision, tap: Tap, usage: Usage) -> bool:
        """The answer has passed; whether it named its experts."""
        return self._foreign is not None and self._foreign.note(decision, tap, usage)

    def attempt_failed(self, exchange: Exchange, decision: Decision, how: Failure, detail: str) -> None:
        """Remember what failed; an engine that cannot be reached is left alone until it gives a sign of life."""
        exchange.failures.append(how)
        self.metrics.failed(how)
        log.warning("request %s: %s failed: %s", exchange.request_id, decision.target.name, detail)
        if how is Failure.CONNECT:
            self.view.unreachable(decision.target.key[0])

    def tokenizer(self, digest: str | None) -> ModelTokenizer | None:
        return self.lexicon.get(digest)

    def forget_worker(self, worker_id: int) -> None:
        """An incarnation is gone for good: what was known of it goes too."""
        self.view.forget(worker_id)
        self.picker.forget_worker(worker_id)
        self.metrics.forget_worker(worker_id)
        if self.feeds is not None:
            self.feeds.kv.forget_worker(worker_id)
            self.feeds.tracker.keep_only(self.view.keep_clusters())
        self.lexicon.keep_only({state.joined.tokenizer for state in self.view.engines() if state.joined.tokenizer is not None})

    def _tokenizer_changed(self, digest: str, reason: str | None) -> None:
        for state in self.view.engines():
            if state.joined.tokenizer == digest:
                self.view.block(state.joined.worker_id, reason)

    async def _sweep(self) -> None:
        config = self.config
        dead_after = max(config.dead_after_seconds, _PROBES_MISSED * config.probe_seconds) if config.backends else config.dead_after_seconds
        while True:
            for worker_id in self.view.sweep(self.clock(), dead_after, config.forget_after_seconds):
                self.forget_worker(worker_id)
            self.upstream.prune()
            self.metrics.engines_live.set(sum(state.obstacle is None for state in self.view.engines()))
            await asyncio.sleep(_SWEEP_SECONDS)
