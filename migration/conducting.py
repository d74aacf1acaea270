"""Carries plans out: one handover of an engine at a time, several engines at once.

Everything follows from what is durable: the log says which plan of an engine has no end, and how far it is; the engine's key says whether a
handover is open. So a plan that was just accepted, and one that a dead predecessor left, go the same way: end what is open, then make the next
handover of the plan without an end, until there is none.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from bus import BlobLost, Bus, BusError, Subscription
from bus.claims import LeaseTaken
from bus.subjects import Subjects
from fleet.events import (
    EngineHeartbeat,
    ExpertCopy,
    HandoverDescribed,
    MigrationAborted,
    MigrationAccepted,
    MigrationPlanned,
    Origin,
    PlacementCommitted,
)
from fleet.handover import Conducting as State
from fleet.placement import Placement
from migration.chronicle import Course
from migration.config import MigrationConfig
from migration.coordinator import ENGINE_GONE, Failure, Pace, Undertaking, begun, taken_over
from migration.handing import Handing, Unfit, stray
from migration.journal import Found, Journal, Superseded
from migration.leadership import Leadership
from migration.ledger import Entry, Ledger
from migration.metrics import MigrationMetrics
from migration.plan import Handover, Inapplicable, Plan, applied
from migration.pulse import Pulse
from migration.telling import steps
from migration.tracing import PlanTrace, Tracing

logger = logging.getLogger(__name__)

MOST_WORDS = 16
"""Steps of a plan that an answer puts into words."""
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 1.0


class Busy(ValueError):
    """The engine has a plan under way already; the text names it."""


class _Under(NamedTuple):
    """A plan under way."""

    course: Course
    plan: Plan
    trace: PlanTrace | None


class Conductor:
    """Used on one event loop, while leading. committed: told of every placement that was recorded. clock: seconds that never go back."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: MigrationConfig,
        ledger: Ledger,
        metrics: MigrationMetrics,
        lead: Leadership,
        committed: Callable[[PlacementCommitted], None],
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self.journal = Journal(bus, subjects, ledger, committed, config.retry_seconds)
        self.told: dict[int, dict[int, HandoverDescribed]] = {}
        """by worker_id and rank: what each said last"""
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._ledger = ledger
        self._metrics = metrics
        self._lead = lead
        self._clock = clock
        self._tracing = tracing
        self._pulse = Pulse(config.silent_seconds)
        self._handing = Handing(bus, subjects, self.journal, lead, metrics, self._gone, config.repeat_seconds, clock)
        self._pace = Pace(config.repeat_seconds, _GRACE_SECONDS, config.commit_seconds)
        self._plans: dict[str, tuple[str, Plan]] = {}
        """by engine: id and plan that is under way, as far as it was read"""
        self._traces: dict[str, PlanTrace] = {}
        """by engine"""
        self._since: dict[str, float] = {}
        """by engine: when its plan began"""
        self._accepting: set[str] = set()
        self._attending: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Until cancelled. ready: called once the log is read. BusError when it cannot be at the start; LeaseTaken when somebody else leads."""
        subjects = self._subjects
        async with self._bus.subscribe(subjects.handovers, subjects.heartbeats) as heard:
            await self.journal.read()
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    tasks.create_task(self._listen(heard), name="hears ranks and heartbeats")
                    tasks.create_task(self._follow(), name="follows what is recorded of plans")
                    tasks.create_task(self._watch(), name="watches over plans, and finds those that nobody attends to")
                    ready()
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._tasks = None
                    self._attending.clear()

    # What is asked for

    async def accept(self, entry: Entry, plan: Plan, origin: Origin) -> MigrationAccepted:
        """Begin to carry a plan out: it is durable when this returns.

        plan: one that holds on what the engine serves (`migration.intents`). Busy when it has a plan under way; ValueError when this one is too large or comes
        too late; BusError when the bus fails.
        """
        engine = entry.engine
        self.refuse_second(engine)
        if plan.base_epoch != entry.epoch:
            raise ValueError(f"plan is for epoch {plan.base_epoch}, the engine serves {entry.epoch}; plan anew")
        self._accepting.add(engine)
        try:
            plan = msgspec.structs.replace(plan, id=self.journal.chronicle.unused(engine, plan.id))
            blob = await self.journal.store(plan)
            await self._lead.standing()
            trace = None if self._tracing is None else self._tracing.plan(engine, plan, origin)
            await self.journal.record(_planned(entry, plan, origin, blob, "" if trace is None else trace.traceparent))
            self._plans[engine] = plan.id, plan
            if trace is not None:
                self._traces[engine] = trace
        finally:
            self._accepting.discard(engine)
        self._attend_to(engine)
        return _accepted(entry, plan)

    async def survey(self, entry: Entry) -> tuple[HandoverDescribed, ...]:
        """Where every rank is. Unfit names one that takes part in no handovers, or does not answer."""
        told = await self._handing.survey(entry.worker_id, entry.placement.ranks)
        for said in told:
            self._note(said)
        return told

    def refuse_second(self, engine: str) -> None:
        """Busy when the engine has a plan under way."""
        course = self.journal.chronicle.under_way(engine)
        if course is not None:
            told = f"handover {course.next + 1} of {course.planned.handovers}"
            raise Busy(f"engine {engine!r} is carrying out plan {course.planned.plan} ({told}); ask again when that is over (roost events --kind migration)")
        if engine in self._accepting:
            raise Busy(f"engine {engine!r} is just being given another plan; ask again when that is over")

    # What is heard

    async def _listen(self, heard: Subscription) -> None:
        async for received in heard:
            match received.message:
                case HandoverDescribed() as said:
                    self._note(said)
                    self._handing.hear(said)
                case EngineHeartbeat() as beat:
                    self._pulse.heard(beat.worker_id, self._clock())

    def _note(self, said: HandoverDescribed) -> None:
        entry = self._ledger.entry(said.worker_id)
        if entry is not None and 0 <= said.rank < entry.placement.ranks:
            self.told.setdefault(said.worker_id, {})[said.rank] = said

    async def _follow(self) -> None:
        """Whoever recorded it."""
        async for received in self._bus.replay(self._subjects.migrations()):
            if isinstance(received.message, MigrationPlanned) and self.journal.chronicle.heard(received.message):
                self._attend_to(received.message.engine)

    async def _watch(self) -> None:
        for engine in await self._open():
            self._attend_to(engine)
        while True:
            self._pulse.look(self._clock(), connected=self._bus.connected)
            for engine in self.journal.chronicle.engines():
                self._attend_to(engine)
            self._tell()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _open(self) -> set[str]:
        """Engines of which a handover is open, though no plan."""
        found = set[str]()
        for engine in {*self._ledger.engines(), *self.journal.chronicle.known()}:
            try:
                standing = (await self.journal.look(engine)).open
            except BusError as error:
                logger.warning("whether a handover of engine %s is open cannot be seen: %s", engine, error)
                continue
            if standing is not None and standing.state is not State.IDLE:
                found.add(engine)
        return found

    def _tell(self) -> None:
        """The watchdog's figures."""
        present = {entry.worker_id for entry in self._ledger.engines().values()}
        self._pulse.keep_only(present)
        for worker_id in self.told.keys() - present:
            del self.told[worker_id]
        now, under_way = self._clock(), self.journal.chronicle.engines()
        self._since = {engine: self._since.get(engine, now) for engine in under_way}
        for engine, entry in self._ledger.engines().items():
            self._metrics.cells(engine, tuple(self.told.get(entry.worker_id, {}).values()))
            course = self.journal.chronicle.under_way(engine)
            left = () if course is None or engine not in self._plans else self._plans[engine][1].handovers[course.next :]
            layers = len({step.layer for handover in left for step in handover.steps})
            pending = len(left) if left else 0 if course is None else course.planned.handovers - course.next
            self._metrics.pending(engine, now - self._since[engine] if engine in self._since else 0.0, pending, layers)

    def _gone(self, engine: str, worker_id: int, state: State) -> str:
        """Why an engine is gone. A decided handover cares only for what is certain: an engine that was merely stopped must hear the commit."""
        entry = self._ledger.engines().get(engine)
        if entry is None:
            return "it has left"
        if entry.worker_id != worker_id:
            return "it has begun a new life"
        silent = self._pulse.silent(worker_id, self._clock())
        return f"nothing was heard of it for {silent:.1f} s" if silent and state is not State.COMMITTING else ""

    # What is done

    def _attend_to(self, engine: str) -> None:
        if self._tasks is None or engine in self._attending or engine in self._accepting:
            return
        task = self._attending[engine] = self._tasks.create_task(self._attend(engine), name=f"carries out what engine {engine} is to do")
        task.add_done_callback(lambda _: self._attending.pop(engine, None))

    async def _attend(self, engine: str) -> None:
        """Whatever fails is tried again: a plan must end, and the log must say how."""
        while True:
            try:
                await self._conclude(engine)
                course = self.journal.chronicle.under_way(engine)
                if course is None:
                    self._over(engine)
                    return
                await self._next(engine, course)
            except Superseded as superseded:
                logger.warning("%s", superseded)
                await asyncio.sleep(self._config.retry_seconds)
            except BusError as error:
                logger.warning("the plan of engine %s is held up: %s", engine, error)
                await asyncio.sleep(self._config.retry_seconds)
            except LeaseTaken:
                raise
            except Exception:  # a defect in one engine's plan must not end those of others
                logger.exception("the plan of engine %s is held up", engine)
                await asyncio.sleep(self._config.retry_seconds)

    def _over(self, engine: str) -> None:
        self._plans.pop(engine, None)
        course, trace = self.journal.chronicle.course(engine), self._traces.pop(engine, None)
        if trace is not None and course is not None:
            trace.end(course.end)

    async def _conclude(self, engine: str) -> Found:
        """End what is open under the engine's key."""
        found = await self.journal.look(engine)
        left = found.open
        if left is None or left.state is State.IDLE:
            return found
        logger.info("handover %d of engine %s was left %s; going on with it", left.handover, engine, left.state)
        course = self.journal.chronicle.course(engine)
        staged = course.staged if course is not None and course.staged is not None and course.staged.handover == left.handover else None
        entry = self._ledger.entry(left.worker_id)
        what = Undertaking(
            engine=engine,
            worker_id=left.worker_id,
            ranks=left.ranks,
            handover=left.handover,
            plan=left.plan,
            number=left.number,
            last=left.last,
            epoch=left.epoch,
            placement=None if staged is None else staged.placement,
            layout=None if entry is None else entry.layout,
            copied=left.copied,
            bytes=left.bytes,
            stage_seconds=self._config.stage_seconds,
        )
        await self._lead.standing()
        proceeding = taken_over(what, left, self._lead.token, self._pace, self._clock(), 0.0 if staged is None else staged.seconds)
        await self._handing.carry(proceeding, found.revision)
        return await self.journal.look(engine)

    async def _next(self, engine: str, course: Course) -> None:
        """One more handover of a plan; or its end, where it cannot go on."""
        entry = self._ledger.engines().get(engine)
        if entry is None or entry.worker_id != course.planned.worker_id:
            why = f"engine {engine!r} {'has left' if entry is None else 'has begun a new life'}; plan anew for what it serves then"
            return await self._drop(course, Failure(why, ENGINE_GONE))
        try:
            under = _Under(course, await self._plan(engine, course), self._trace(engine, course))
            handover = under.plan.handovers[course.next]
            placement = await asyncio.to_thread(applied, entry.placement, handover)
        except (BlobLost, IndexError) as error:
            return await self._drop(course, Failure(f"its plan is not stored (any more): {error}; plan anew", "plan"))
        except Inapplicable as error:
            return await self._drop(course, Failure(str(error), error.cause.value))
        try:
            what, found = await self._ready(entry, under, handover, placement)
        except Unfit as unfit:
            return await self._drop(course, unfit.failure)
        await self._hand_over(what, found, under)
        return None

    async def _ready(self, entry: Entry, under: _Under, handover: Handover, placement: Placement) -> tuple[Undertaking, Found]:
        """What is to be done next, once every rank has said that it is free for it. Unfit when one is not."""
        engine = entry.engine
        told = await self.survey(entry)
        found = await self._conclude(engine)
        if (open_ := stray(told)) is not None:
            found = await self._clear(entry, under.course, *open_, found)
            told = await self.survey(entry)
        for said in told:
            if said.handover or said.served != entry.epoch:
                why = f"rank {said.rank} serves epoch {said.served}, but the log says {entry.epoch}: restart engine {engine!r}"
                raise Unfit(Failure(why, "epoch", said.rank))
        previous = 0 if found.open is None else found.open.handover
        number = 1 + max(previous, *(said.concluded for said in told))
        if (token := max(said.token for said in told)) > self._lead.token:
            await self._lead.outbid(token)
        return self._undertaking(entry, under, handover, placement, number), found

    def _undertaking(self, entry: Entry, under: _Under, handover: Handover, placement: Placement, number: int) -> Undertaking:
        copies = copies_of(handover)
        return Undertaking(
            engine=entry.engine,
            worker_id=entry.worker_id,
            ranks=placement.ranks,
            handover=number,
            plan=under.course.planned.plan,
            number=under.course.next,
            last=under.course.next + 1 == len(under.plan.handovers),
            epoch=handover.epoch,
            placement=placement.record(),
            layout=entry.layout,
            copies=copies,
            copied=len(copies),
            bytes=handover.bytes,
            stage_seconds=self._config.stage_seconds + _most_bytes(handover, placement) / self._config.stage_bytes_per_second,
        )

    async def _hand_over(self, what: Undertaking, found: Found, under: _Under) -> None:
        trace = None if under.trace is None else under.trace.handover(what)
        if trace is not None:
            what = trace.carried_by(what)
        await self._lead.standing()
        proceeding = begun(what, self._lead.token, self._pace, self._clock())
        revision = await self.journal.keep(what.engine, proceeding.durable(State.PROPOSING, self._clock()), found.revision)
        await self._handing.carry(proceeding, revision, trace)

    async def _clear(self, entry: Entry, course: Course, number: int, state: State, found: Found) -> Found:
        """End a handover that ranks have open, though nothing durable knows of it: a server lost its store."""
        logger.warning("ranks of engine %s have handover %d open, of which nothing is stored; %s", entry.engine, number, state)
        what = Undertaking(
            engine=entry.engine,
            worker_id=entry.worker_id,
            ranks=entry.placement.ranks,
            handover=number,
            plan="",
            number=0,
            last=False,
            epoch=course.planned.base_epoch,
            placement=None,
            layout=None,
            stage_seconds=self._config.stage_seconds,
        )
        blank = begun(what, self._lead.token, self._pace, self._clock()).durable(state, self._clock())
        revision = await self.journal.keep(entry.engine, blank, found.revision)
        await self._handing.carry(taken_over(what, blank, self._lead.token, self._pace, self._clock()), revision)
        return await self.journal.look(entry.engine)

    async def _drop(self, course: Course, failure: Failure) -> None:
        """The rest of a plan is given up, with no handover open."""
        planned = course.planned
        logger.warning("plan %s of engine %s is given up: %s", planned.plan, planned.engine, failure.reason)
        dropped = MigrationAborted(
            engine=planned.engine,
            worker_id=planned.worker_id,
            plan=planned.plan,
            handover=0,
            number=course.next,
            epoch=planned.base_epoch + course.next + 1,
            reason=failure.reason,
            fault=failure.fault,
            rank=failure.rank,
        )
        await self.journal.record(dropped)
        self._metrics.dropped(failure.fault)

    async def _plan(self, engine: str, course: Course) -> Plan:
        """BlobLost when it is not stored."""
        name, plan = self._plans.get(engine, ("", None))
        if plan is None or name != course.planned.plan:
            plan = await self.journal.plan(course.planned.blob)
            self._plans[engine] = course.planned.plan, plan
        return plan

    def _trace(self, engine: str, course: Course) -> PlanTrace | None:
        if engine not in self._traces and self._tracing is not None:
            self._traces[engine] = self._tracing.resumed(course.planned)
        return self._traces.get(engine)


def copies_of(handover: Handover) -> tuple[ExpertCopy, ...]:
    """What ranks are told to copy."""
    return tuple(
        ExpertCopy(layer=step.layer, expert=copy.expert, source=copy.source, slot=copy.slot)
        for step in handover.steps
        for copy in step.copies
        if copy.source is not None
    )


def _most_bytes(handover: Handover, placement: Placement) -> float:
    """That any rank takes."""
    taken = [0] * placement.ranks
    for step in handover.steps:
        for copy in step.copies:
            taken[copy.slot // placement.slots_per_rank] += copy.bytes
    return max(taken)


def _planned(entry: Entry, plan: Plan, origin: Origin, blob: str, traceparent: str) -> MigrationPlanned:
    return MigrationPlanned(
        engine=entry.engine,
        worker_id=entry.worker_id,
        plan=plan.id,
        origin=origin,
        base_epoch=plan.base_epoch,
        handovers=len(plan.handovers),
        copies=len(plan.copies),
        bytes=plan.bytes,
        reason=plan.reason,
        blob=blob,
        traceparent=traceparent,
    )


def _accepted(entry: Entry, plan: Plan) -> MigrationAccepted:
    return MigrationAccepted(
        engine=entry.engine,
        worker_id=entry.worker_id,
        plan=plan.id,
        handovers=len(plan.handovers),
        copies=len(plan.copies),
        bytes=plan.bytes,
        what=tuple(step.what for step in steps(plan)[:MOST_WORDS]),
    )
