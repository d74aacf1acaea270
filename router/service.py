"""The router as one object: its state, its background tasks, and the synchronous methods that serve
requests."""

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from bus import Bus, BusError, Message
from bus.protocol.subjects import Subjects
from fleet.completions import DECISION_HEADER, ApiError
from fleet.facts.engines import ConfigChanged
from fleet.requests.plans import DescribePlan
from router.admission.retry_budget import RetryBudget
from router.bodies.reader import BodyReader
from router.config import RouterConfig
from router.context import OtherRuntime, RouterContext
from router.credentials import RouterCredentials
from router.feedback.decision_feedback import DecisionFeedback
from router.feedback.outcome_reporter import OutcomeReporter
from router.feedback.routed_experts_reporter import RoutedExpertsReporter
from router.fleet_state.booking_replication import BookingMessage
from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import RankKey
from router.foreign_api.routed_experts_parser import RoutedExpertsParser, TokenUsage
from router.health.attempt_failures import AttemptFailure
from router.http.body_budget import BodyBudget
from router.prefix_index.awaited_prompts import AwaitedPrompts
from router.prefix_index.prompt import Prompt, TokenPrompt
from router.reload import refused, reloaded
from router.scheduling.booking_observer import BookedRequest, BookingObserver
from router.scheduling.decision import Decision
from router.scheduling.external_reservations import ExternalReservations, ReleaseRecord
from router.scheduling.routing_request import FIRST_TRY, Attempt, RoutingRequest
from router.scheduling.scheduler import Lap, Scheduler
from router.secure_random import SecureRandom
from router.sync.fleet_events import FleetEvents
from router.sync.fleet_subscriber import FleetSubscriber
from router.sync.peer_routers import PeerRouters
from router.sync.readiness import Readiness
from router.telemetry.bookkeeping import Bookkeeping
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_log import RequestEnd, RequestLog
from router.tokenization.tokenizer import ModelTokenizer
from router.tokenization.tokenizer_registry import TokenizerRegistry
from router.upstream.rank_client import Upstream
from router.upstream.static_backends import StaticBackends
from router.wait_queue import WaitQueue

log = logging.getLogger(__name__)

WHOLE_EVENTS = 16
"""Limit of a static backend's complete response, in units of `max_event_bytes`. The same limit applies to its
expert report.
"""
_DECISION = re.compile(r"([0-9a-f]{8}|[0-9a-f]{4})[0-9a-f]{12}(-.{1,32})?")
"""Decision id: the router's tag (4 digits in older routers), 12 random digits, and a suffix for the choice
and the attempt.
"""
_SWEEP_SECONDS = 0.25
_FORGET_SECONDS = 600.0
"""Time for which a dead engine's state is kept for its return."""
_SWEPT_BLOCKS = 1024
"""Most blocks of the prefix index that one sweep visits: less than a millisecond."""


class _Reporters(NamedTuple):
    """Reports to the tracker, on finished requests."""

    outcomes: OutcomeReporter
    routed_experts: RoutedExpertsReporter


class RouterService:
    """Keep the view fresh in `run` until cancelled; all other methods are synchronous unless declared
    `async`. bus: None serves static backends only.
    """

    draining = False
    """shutdown was requested: /ready reports 503"""
    refusing = False
    """new requests are refused as well"""
    fleet_subscriber: FleetSubscriber | None = None
    """this, the next and the reporters: None without a bus"""
    peers: PeerRouters | None = None
    other_runtime: OtherRuntime | None = None
    """None: all targets are reached over HTTP"""
    events: FleetEvents | None = None
    """events for programs"""
    _reporters: _Reporters | None = None

    def __init__(
        self,
        bus: Bus | None,
        subjects: Subjects,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """Read the key files: OSError or ValueError when one cannot be used. chance: breaks ties, and nothing
        else.
        """
        self.config = config
        self.clock = clock
        self.bus = bus
        self.subjects = subjects
        self.instance = secrets.randbits(64)
        """identity of this process in the audit log of settings"""
        self.started_at = int(time.time())
        self.tag = secrets.token_hex(4)
        """prefix of this router's decision ids"""
        self._chance = random.Random() if chance is None else chance
        self._secrets = SecureRandom()
        self._known_to_share: set[int] = set()
        """workers of engines without tenant isolation for which the warning was already logged"""
        self._known_to_differ: set[str] = set()
        """models whose servers make other token ids of prompts, as already logged"""
        self.metrics = RouterMetrics()
        self.bookkeeping = Bookkeeping()
        self.metrics.before_exposition = self.bookkeeping.catch_up
        self._use(RouterCredentials.read(config))
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="roost-router")
        self.upstream = Upstream(config)
        self.scheduler = Scheduler.create(config)
        self.view = self.scheduler.view
        self._awaited: AwaitedPrompts[Booking] = AwaitedPrompts(self.scheduler.kv.block_index)
        self.retries = RetryBudget(config.retry_share, config.min_retries)
        self.external_reservations = ExternalReservations(config.reservation_seconds)
        self.tokenizers = TokenizerRegistry(self.threads, self._tokenizer_changed, config.segment_cache_bytes)
        self.body_budget = BodyBudget(config.bodies_bytes)
        self.bodies = BodyReader(config, self.tokenizers)
        self.backends = StaticBackends(
            config, lambda url: self.credentials.backend_key_of(url), self.view, clock, self.forget_worker
        )
        context = RouterContext(subjects, self.scheduler, self.metrics, self.threads, clock)
        self.feedback = DecisionFeedback(bus, context, self.backends.served)
        self.wait_queue = WaitQueue(self)
        if bus is not None:
            self._connect(bus, context)
        self.readiness = Readiness(self.view, self.fleet_subscriber, self.peers)
        self._observers: tuple[BookingObserver, ...] = (
            self.scheduler,
            *(() if self.peers is None else (self.peers,)),
            self.feedback,
            self.wait_queue,
        )
        """observers of bookings, in the order in which they are called"""

    def _connect(self, bus: Bus, context: RouterContext) -> None:
        """Create what follows the fleet over the bus, and what reports to the tracker."""
        config, subjects, metrics = self.config, self.subjects, self.metrics
        self.events = FleetEvents(bus, subjects, self._engine_name)
        self.fleet_subscriber = FleetSubscriber(
            bus,
            context,
            self.tokenizers,
            self.forget_worker,
            self.feedback.reported,
            self.wait_queue.wake,
            self._prompts_computed,
            self.events.heard,
        )
        self.peers = PeerRouters(
            bus,
            context,
            config,
            self._booked_by_peer,
            self.end_reserved,
            self.wait_queue.wake,
            self.fleet_subscriber.members_known,
        )
        self._reporters = _Reporters(
            OutcomeReporter(
                bus,
                subjects,
                metrics,
                seconds=config.outcome_seconds,
            ),
            RoutedExpertsReporter(bus, context, WHOLE_EVENTS * config.max_event_bytes),
        )

    @property
    def ready(self) -> bool:
        """True once the initial state is complete and at least one live engine can be used."""
        return not self.draining and self.readiness.over and bool(self.view.models(live=True))

    @property
    def missing(self) -> list[str]:
        """Return the conditions that readiness still waits for."""
        if self.draining:
            return ["nothing: it is draining, and will stop"]
        return [*self.readiness.missing(), *([] if self.view.models(live=True) else ["a live engine"])]

    @property
    def bus_silent(self) -> bool:
        """True while the bus delivers nothing, so that missing heartbeats say nothing about engines."""
        return self.peers is not None and self.peers.bus_silent

    async def run(self) -> None:
        """Listen, probe and sweep until cancelled."""
        async with AsyncExitStack() as stack:
            stack.callback(self.threads.shutdown, wait=False, cancel_futures=True)
            stack.callback(self.bookkeeping.catch_up)
            await stack.enter_async_context(self.bodies)
            stack.callback(self.wait_queue.close)
            await stack.enter_async_context(self.upstream)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            if self.fleet_subscriber is not None:
                tasks.create_task(self.fleet_subscriber.run(), name="listens to the bus")
            if self.peers is not None:
                tasks.create_task(self.peers.run(), name="replicates bookings between routers")
                tasks.create_task(self.readiness.run(), name="waits for the initial state")
            if self._reporters is not None:
                outcomes, routed_experts = self._reporters
                tasks.create_task(outcomes.run(), name="reports finished requests to the tracker")
                tasks.create_task(
                    routed_experts.run(), name="reports routed experts of foreign engines to the tracker"
                )
            if self.config.backends or self.config.named_backends:
                tasks.create_task(
                    self.backends.run(
                        self.upstream, self.config.probe_seconds, self.config.probe_timeout_seconds
                    ),
                    name="probes static backends",
                )
            tasks.create_task(self.feedback.run(), name="measures speeds and regret")
            tasks.create_task(self._sweep(), name="declares silent engines dead")

    # Settings that change while it runs

    def reconfigure(self, new: RouterConfig) -> ConfigChanged:
        """Apply other settings and the present content of the key files, from the next request on.

        All of them apply, or none when one needs a restart; the result says which. OSError or ValueError when
        a key file or CA file cannot be used: nothing is changed.
        """
        change = reloaded(self.config, new, self.instance)
        if change.refused is not None:
            return change
        credentials = RouterCredentials.read(new)
        self.upstream.reconfigure(new)
        change = msgspec.structs.replace(
            change, changed=change.changed | self.credentials.changes(credentials)
        )
        self._use(credentials)
        if change.changed:
            self.config = new
            self.scheduler.reconfigure(new)
            self.retries.reconfigure(new.retry_share, new.min_retries)
        return change

    def _use(self, credentials: RouterCredentials) -> None:
        self.credentials = credentials
        self.metrics.know_tenants(frozenset() if credentials.clients is None else credentials.clients.tenants)

    async def reload(self, read: Callable[[], RouterConfig]) -> ConfigChanged:
        """Call `reconfigure` with the settings that `read` returns, log the outcome and store it on the bus.
        ValueError or OSError of `read`: the reload is refused.
        """
        try:
            change = self.reconfigure(read())
        except (ValueError, OSError) as error:
            change = refused(str(error), self.instance)
        self.metrics.reloads.labels(
            "refused" if change.refused is not None else "changed" if change.changed else "same"
        ).inc()
        changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in change.changed.items())
        if change.refused is None:
            log.info("settings were read again: %s", changes or "nothing differs")
        else:
            log.error("new settings are refused: %s", change.refused)
        if self.bus is not None:
            try:
                await self.bus.record(self.subjects.config(change.part), change)
            except BusError as error:
                log.warning("the outcome of the reload cannot be stored on the bus: %s", error)
        return change

    # What requests are served with

    # Request ids, decision ids and sampling seeds must not be guessable, so they come from the system's
    # generator. `chance` need not be secret: decision records print its numbers.

    def new_request_id(self) -> str:
        """Return 24 hexadecimal digits."""
        return self._secrets.take(12).hex()

    def new_decision_id(self) -> str:
        """Return the router's tag and 12 hexadecimal digits."""
        return self.tag + self._secrets.take(6).hex()

    def draw_seed(self) -> int:
        """Draw a seed for a request that names none, so that a rank which continues the answer can repeat its
        sampling.
        """
        return int.from_bytes(self._secrets.take(8)) >> 1

    def decide(
        self, need: RoutingRequest, decision_id: str, attempt: Attempt = FIRST_TRY, lap: Lap | None = None
    ) -> Decision:
        """Decide without booking. ApiError: see `Scheduler.decide`."""
        return self.scheduler.decide(
            need, decision_id, self._chance.getrandbits(32), self.clock(), attempt, lap
        )

    def book(
        self, request_log: RequestLog, need: RoutingRequest, suffix: str, attempt: Attempt
    ) -> tuple[Decision, Booking]:
        """Decide, book the load on the chosen rank at once, and record the decision's span."""
        started, lap = time.perf_counter(), self.metrics.lap()
        if trace_id := request_log.trace_id:
            need = msgspec.structs.replace(need, trace_id=trace_id)
        decision = self.decide(need, request_log.decision_id + suffix, attempt, lap)
        now = self.clock()
        timed = (
            request_log.stream or decision.target_table.dialect != "text"
        )  # an unstreamed response shows no time to first token
        booking = self.scheduler.book(decision, need.prompt, now, external=need.external, timed=timed)
        booked = BookedRequest(decision, booking, need.prompt, request_log.queued_seconds > 0)
        for observer in self._observers:
            observer.booked(booked)
        if attempt.number == 1:
            self.retries.count_request(now)
        if lap is not None:
            lap("book")
        seconds = time.perf_counter() - started
        self.bookkeeping.add(self.metrics.decided, decision, seconds)
        if decision.shared_cache:
            self._warn_shared_cache(decision)
        if request_log.trace is not None:
            ended = time.time_ns()
            request_log.trace.decided(decision, ended - int(1e9 * seconds), ended)
        return decision, booking

    def _warn_shared_cache(self, decision: Decision) -> None:
        """Warn once per engine that ignores the cache salt of a request."""
        engine = decision.target.engine
        if engine.worker_id not in self._known_to_share:
            self._known_to_share.add(engine.worker_id)
            log.warning(
                "engine %s does not isolate tenants: requests of different tenants share its KV cache, and"
                " cached_tokens reveals it",
                engine.engine,
            )

    def ended(self, request_log: RequestLog, outcome: RequestEnd) -> None:
        """Write a request's log line, count it and end its trace, soon."""
        self.bookkeeping.add(request_log.finish, outcome, self.clock(), time.time_ns(), self.metrics)

    def first_token(self, booking: Booking) -> None:
        now = self.clock()
        for observer in self._observers:
            observer.first_token(booking, now)

    def prompt_computed(self, booking: Booking) -> None:
        """Count a booking's prompt as computed. This is an expectation: it updates no speed, and it is no
        sign of life.
        """
        for observer in self._observers:
            observer.prompt_computed(booking)

    def await_prompt(self, decision: Decision, booking: Booking, prompt: Prompt) -> bool:
        """Count the prompt of an unstreamed answer as computed when the rank's KV events say so. False when
        they will not.
        """
        target = decision.target
        return target.engine.capabilities.kv_events and self._awaited.begin(
            target.key, booking, prompt, target.engine.block_size
        )

    def await_no_longer(self, decision: Decision, booking: Booking) -> None:
        """End `await_prompt`: the answer has arrived, or will not."""
        self._awaited.end(decision.target.key, booking)

    def _prompts_computed(self, rank: RankKey) -> None:
        for booking in self._awaited.computed(rank):
            self.first_token(booking)

    def expected_prefill_seconds(self, decision: Decision) -> float:
        """Return the expected seconds from a decision to the end of its prefill, for an unstreamed response
        without a visible first token.

        The stated or measured speed gives the estimate; a default before any is known.
        """
        return self.feedback.expected_first_token(decision)

    def emitted(self, booking: Booking, tokens: int) -> None:
        """Count tokens that arrived since the last call. Call it once per several tokens, not for each
        token."""
        now = self.clock()
        for observer in self._observers:
            observer.emitted(booking, tokens, now)

    def release(self, booking: Booking) -> None:
        for observer in self._observers:
            observer.released(booking)

    # What is held for other data planes

    def hold(self, decision: Decision, booking: Booking) -> None:
        """Hold a booking under its decision's id until its release, or until `reservation_seconds` after its
        last update.
        """
        self.external_reservations.hold(decision.id, booking, self.clock(), decision.ask.owner.tenant)
        self.scheduler.health.untimed(booking)  # the other data plane may never report the first token

    def released(self, decision_id: str, *, first_token: bool, tenant: str | None = None) -> ReleaseRecord:
        """Release what this router or another one reserved for a tenant (None: for any tenant). Idempotent.
        Another tenant's reservation is reported exactly as an unknown id.
        """
        if self.end_reserved(decision_id, first_token, tenant):
            return ReleaseRecord(id=decision_id, outcome="noted" if first_token else "ended")
        if self.peers is None:
            return ReleaseRecord(id=decision_id, outcome="unknown")
        elsewhere = not decision_id.startswith(
            self.tag
        )  # the booking's message from that router may not have arrived yet
        known = self.peers.booked_elsewhere(decision_id)
        if known or elsewhere:
            self.peers.pass_on(decision_id, first_token=first_token, tenant=tenant)
        if tenant is not None:  # a tenant must not learn what other routers hold for other tenants
            known = elsewhere
        return ReleaseRecord(id=decision_id, outcome="passed_on" if known else "unknown")

    def end_reserved(self, decision_id: str, first_token: bool, tenant: str | None = None) -> bool:
        """End a tenant's reservation (None: any tenant's), or (first_token) count its prompt as computed.
        False when the reservation is unknown or over.
        """
        booking = (
            self.external_reservations.renew(decision_id, self.clock(), tenant)
            if first_token
            else self.external_reservations.end(decision_id, tenant)
        )
        if booking is None:
            return False
        if first_token:
            self.first_token(booking)
        else:
            self.release(booking)
        return True

    def _booked_by_peer(self, rank: RankKey, message: BookingMessage) -> None:
        self.scheduler.record_route(rank, message.session, message.prefix, self.clock())

    def finished(
        self, decision: Decision, booking: Booking, prompt: Prompt, *, reported: bool = False
    ) -> None:
        """Record that this decision's rank completed a choice. prompt: the one that was decided on. reported:
        the response contained its expert routing.
        """
        self.scheduler.health.answered(booking, self.clock())
        self.backends.served(decision.target.key[0])
        if self._reporters is not None:
            self._reporters.outcomes.note(decision, prompt, reported=reported)

    def prompt_differs(self, decision: Decision, own: TokenPrompt, ids: list[int]) -> TokenPrompt:
        """Record that a server made other ids of a prompt than this router, and return the prompt of these
        ids: they are the ones that were computed.
        """
        prompt, model = own.with_ids(ids), decision.ask.model
        self.metrics.prompts_differ.labels(model).inc()
        self.scheduler.routed(decision, prompt)
        if model not in self._known_to_differ:
            self._known_to_differ.add(model)
            unlike = (at for at, (one, other) in enumerate(zip(own.ids, ids, strict=False)) if one != other)
            log.warning(
                "%s makes other token ids of prompts than this router (decision %s: %d tokens, here %d; the"
                " first %d agree). Its ids count. Prefixes in its cache are found only as far as both agree;"
                " its agent should publish the tokenizer and chat template that it really uses",
                decision.target.name,
                decision.id,
                len(ids),
                len(own.ids),
                next(unlike, min(len(own.ids), len(ids))),
            )
        return prompt

    def tap(self, decision: Decision) -> RoutedExpertsParser | None:
        """Return the parser of routed experts for the response of an engine that does not report them
        itself."""
        return None if self._reporters is None else self._reporters.routed_experts.tap(decision)

    def routed(self, decision: Decision, tap: RoutedExpertsParser, usage: TokenUsage) -> bool:
        """Record the experts of a completed response. True when the response named its experts."""
        return self._reporters is not None and self._reporters.routed_experts.note(decision, tap, usage)

    def attempt_failed(
        self, request_log: RequestLog, decision: Decision, booking: Booking, how: AttemptFailure, detail: str
    ) -> None:
        """Record a failed attempt. An engine that refuses connections is excluded until its next sign of
        life.
        """
        request_log.failures.append(how)
        self.metrics.failed(how)
        log.warning("request %s: %s failed: %s", request_log.request_id, decision.target.name, detail)
        if how is AttemptFailure.BUSY:
            self.scheduler.reported_busy(decision.target.key, self.clock())
        elif self.scheduler.health.failed(booking, self.clock()):
            self.metrics.breakers_opened.inc()
            log.warning("circuit breaker of %s opened: too many consecutive failures", decision.target.name)
        if (
            how is AttemptFailure.CONNECT and not self.bus_silent
        ):  # without the bus nothing could report its return
            self.view.unreachable(decision.target.key[0])

    def may_retry(self, how: AttemptFailure, *, begun: bool) -> None:
        """Charge the retry budget for one more attempt.

        begun: the client has part of the answer, which would be lost; always allowed. ApiError 503 (429 after
        a busy rank), with Retry-After, when the budget is exhausted.
        """
        if (
            begun
            or how is AttemptFailure.CONNECT
            or self.retries.may_retry(self.clock(), self.scheduler.health.open_visits)
        ):
            return
        self.metrics.retries_refused.inc()
        message = (
            f"a rank failed this request ({how.value}), and too many of the last requests were tried again"
            " already; ask again"
        )
        busy = how is AttemptFailure.BUSY
        raise ApiError(
            429 if busy else 503, message, code="saturated" if busy else "upstream_failed", retry_after=2.0
        )

    def tokenizer(self, digest: str | None) -> ModelTokenizer | None:
        return self.tokenizers.get(digest)

    async def decision(self, decision_id: str, tenant: str | None = None) -> bytes:
        """Return a recent decision as JSON, from this router or from the one that the id names.

        tenant: return that tenant's decisions only; None: any tenant's. ApiError 404 says which routers were
        consulted. Another tenant's decision gets the same error as a missing one.
        """
        kept = self.kept(decision_id, tenant)
        if kept is not None:
            return msgspec.json.encode(kept.record())
        match = _DECISION.fullmatch(decision_id)
        tag = "" if match is None else match[1]
        if tag in ("", self.tag):
            message = (
                f"no decision {decision_id!r} among the last {self.config.kept_decisions}; its id is in the"
                f" answer's header {DECISION_HEADER}"
            )
            raise ApiError(404, message, code="decision_not_found")
        if self.peers is None:
            message = (
                f"decision {decision_id!r} was made by another router ({tag}), which cannot be queried: there"
                " is no bus"
            )
            raise ApiError(404, message, code="decision_not_found")
        try:
            return await self.peers.decision(tag, decision_id, tenant)
        except BusError as error:
            raise ApiError(
                404,
                f"decision {decision_id!r} was made by another router ({tag}): {error}",
                code="decision_not_found",
            ) from error

    def kept(self, decision_id: str, tenant: str | None = None) -> Decision | None:
        """Return a recent decision of this router; tenant: only if it is that tenant's (None: any)."""
        kept = self.scheduler.kept.get(decision_id)
        return kept if kept is None or tenant is None or kept.ask.owner.tenant == tenant else None

    async def ask_planner(self, question: Message, seconds: float) -> Message:
        """Return the planner's answer about a plan, or else about its loop. BusError without one, or without
        a bus.
        """
        if self.bus is None:
            raise BusError("this router has no bus")
        planning = isinstance(question, DescribePlan)
        subject = self.subjects.describe_plan if planning else self.subjects.loop
        return await self.bus.request(subject, question, seconds)

    def forget_worker(self, worker_id: int) -> None:
        """Drop all state of an incarnation that will not return."""
        self.view.forget(worker_id)
        self.scheduler.forget_worker(worker_id)
        self.metrics.forget_worker(worker_id)
        self._known_to_share.discard(worker_id)
        self.feedback.forget_worker(worker_id)
        if self.fleet_subscriber is not None:
            self.fleet_subscriber.kv.forget_worker(worker_id)
            self.fleet_subscriber.tracker.keep_only(self.view.keep_clusters())
        self.tokenizers.keep_only(
            {state.joined.tokenizer for state in self.view.engines() if state.joined.tokenizer is not None}
        )

    def _engine_name(self, worker_id: int) -> str | None:
        state = self.view.engine(worker_id)
        return None if state is None else state.joined.engine

    def refuse_new(self) -> None:
        """Refuse new requests, and end the streams of events, which would never end otherwise."""
        self.refusing = True
        if self.events is not None:
            self.events.close("the router stops")

    def _tokenizer_changed(self, digest: str, reason: str | None) -> None:
        for state in self.view.engines():
            if state.joined.tokenizer == digest and state.dialect == "ids":
                self.view.block(state.joined.worker_id, reason)

    async def _sweep(self) -> None:
        config = self.config
        was_silent = False
        while True:
            now = self.clock()
            silent = self.bus_silent
            self.view.listen(now, audible=not silent)
            if silent and not was_silent:
                self._doubt_failures(now)
            was_silent = silent
            for worker_id in self.view.sweep(now, config.dead_after_seconds, _FORGET_SECONDS):
                self.forget_worker(worker_id)
            self._eject_outliers(now)
            self._expire(now)
            self.scheduler.kv.block_index.sweep(_SWEPT_BLOCKS)
            self.upstream.prune()
            if self.tokenizers.seen is not None:
                self.metrics.characters(
                    self.tokenizers.seen.known_characters, self.tokenizers.seen.new_characters
                )
            self.metrics.engines_live.set(sum(state.obstacle is None for state in self.view.engines()))
            due = time.perf_counter() + _SWEEP_SECONDS
            await asyncio.sleep(_SWEEP_SECONDS)
            self.metrics.loop_lag.observe(max(0.0, time.perf_counter() - due))

    def _doubt_failures(self, now: float) -> None:
        """Readmit engines excluded after one failed connection: without the bus nothing can report their
        return. Circuit breakers still exclude those that keep failing.
        """
        for state in self.view.engines():
            if state.status is EngineStatus.UNREACHABLE and not self.backends.probes(state.joined.worker_id):
                self.view.sign_of_life(state.joined.worker_id, now)

    def _expire(self, now: float) -> None:
        """Release reservations whose time is over, of this router's clients and of other routers."""
        for booking in self.external_reservations.due(now):
            self.release(booking)
        self._count_bodies()
        self.metrics.reservations(
            len(self.external_reservations),
            self.external_reservations.released,
            self.external_reservations.expired,
        )
        if self.peers is not None:
            self.peers.sweep()
            self.metrics.bus_silent.set(self.bus_silent)

    def _count_bodies(self) -> None:
        budget, workers = self.body_budget, self.bodies.workers
        self.metrics.bodies(budget.held, budget.refused, workers.waiting, workers.started, workers.died)

    def _eject_outliers(self, now: float) -> None:
        """Update outlier ejection, and the metric of excluded ranks."""
        self.metrics.rank_excluded(self.scheduler.eject_outliers(now))
