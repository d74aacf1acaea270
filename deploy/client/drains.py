"""Draining: an operator's request to route nothing new to a rank or an engine. It is stored on the bus, so
later routers see it too.

Running requests continue. A drain applies to one incarnation: a restarted engine receives requests again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bus import Bus, BusError, Message, Subscription
from bus.protocol.subjects import Subjects
from deploy.client.fleet_status import EngineNow, members
from deploy.process import alongside
from fleet.facts.bookings import ReservationsChanged
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import RankDrained
from fleet.requests.routing import DescribeReservations, ReservationsDescribed

LOOK_SECONDS = 0.5
"""Poll interval for remaining work."""
SETTLE_SECONDS = 1.0
"""Time after a drain by which a router that chose the rank just before has announced its booking, and every
router has reported."""
QUIET_REPORTS = 2
"""Consecutive load reports without work after which a rank counts as idle."""


class NoSuchTarget(Exception):
    """Unknown engine or rank; the text lists those that exist."""


@dataclass(frozen=True, slots=True)
class DrainTarget:
    """One rank of an engine, or (None) all of them."""

    engine: EngineNow
    rank: int | None

    @property
    def name(self) -> str:
        return self.engine.joined.engine if self.rank is None else f"{self.engine.joined.engine}/{self.rank}"

    @property
    def ranks(self) -> Sequence[int]:
        return range(_targets(self.engine)) if self.rank is None else (self.rank,)


async def find(bus: Bus, subjects: Subjects, text: str) -> DrainTarget:
    """Resolve ENGINE or ENGINE/RANK. Raises NoSuchTarget, whose text lists the valid targets."""
    engines = {engine.joined.engine: engine for engine in await members(bus, subjects)}
    name, slash, number = text.partition("/")
    there = (
        ", ".join(
            f"{engine} (ranks 0 to {_targets(now) - 1})" if _targets(now) > 1 else engine
            for engine, now in engines.items()
        )
        or "none"
    )
    if name not in engines:
        problem = (
            f"no engine {name!r} is a member of the fleet; engines: {there}. Servers given by --backend are"
            " no members: name their router with --url"
        )
        raise NoSuchTarget(problem)
    if not slash:
        return DrainTarget(engines[name], None)
    targets = _targets(engines[name])
    if not number.isdecimal() or int(number) >= targets:
        one = " (it is one target: its ranks work on every request together)" if targets == 1 else ""
        raise NoSuchTarget(
            f"engine {name} has no rank {number!r}{one}; ranks: {', '.join(map(str, range(targets)))}"
        )
    return DrainTarget(engines[name], int(number))


async def drain(bus: Bus, subjects: Subjects, place: DrainTarget, reason: str) -> None:
    """Store a drain for this target. Raises BusError if it cannot be stored."""
    await _store(bus, subjects, place.engine, place.rank, draining=True, reason=reason)


async def undrain(bus: Bus, subjects: Subjects, place: DrainTarget) -> bool:
    """Undo a drain; for a whole engine also the drains of its single ranks. Returns False if nothing was
    drained.

    Raises NoSuchTarget if a rank was drained with its whole engine.
    """
    drained = place.engine.drains
    if place.rank is not None and None in drained:
        engine = place.engine.joined.engine
        raise NoSuchTarget(
            f"engine {engine} is drained as a whole; undo that with: roost drain {engine} --undo, and drain"
            " its other ranks singly"
        )
    lifted = list(drained) if place.rank is None else [rank for rank in drained if rank == place.rank]
    for rank in lifted:
        await _store(bus, subjects, place.engine, rank, draining=False, reason="")
    return bool(lifted)


@dataclass(slots=True)
class _RemainingWork:
    """Remaining work on the target. `running`: sequences running or waiting, by rank; `quiet`: consecutive
    reports without any."""

    running: dict[int, int] = field(default_factory=dict)
    quiet: dict[int, int] = field(default_factory=dict)
    routers: set[int] = field(default_factory=set)

    def note(self, message: Message, worker_id: int) -> None:
        if isinstance(message, ReservationsChanged):
            self.routers.add(message.router)
        elif isinstance(message, KvMetrics) and message.worker_id == worker_id:
            busy = (message.running or 0) + (message.waiting or 0)
            self.running[message.dp_rank] = busy
            self.quiet[message.dp_rank] = (
                0 if busy or message.active_prefill_tokens else self.quiet.get(message.dp_rank, 0) + 1
            )


async def until_idle(
    bus: Bus, subjects: Subjects, place: DrainTarget, seconds: float, say: Callable[[str], None]
) -> bool:
    """Wait until ranks report no work and routers report no bookings; return False after `seconds`.

    say: called with the progress as text, whenever it changes.
    """
    work, reported, clock = _RemainingWork(), "", asyncio.get_running_loop().time
    until = clock() + seconds
    async with (
        bus.subscribe(subjects.kv_metrics, subjects.reservations) as reports,
        alongside(_collect(reports, work, place), "collect load reports of the drained ranks"),
    ):
        await asyncio.sleep(min(SETTLE_SECONDS, seconds))
        while True:
            booked = await _booked(bus, subjects, work, place)
            idle, state = _state(work, booked, place)
            if state != reported:
                say(f"{place.name}: {state}")
                reported = state
            if idle:
                return True
            left = until - clock()
            if left <= 0:
                return False
            await asyncio.sleep(min(LOOK_SECONDS, left))


async def _collect(reports: Subscription, work: _RemainingWork, place: DrainTarget) -> None:
    async for received in reports:
        work.note(received.message, place.engine.joined.worker_id)


async def _booked(bus: Bus, subjects: Subjects, work: _RemainingWork, place: DrainTarget) -> int:
    """Count requests that routers have booked there. A router that does not answer counts as gone."""
    targets = {(place.engine.joined.worker_id, rank) for rank in place.ranks}
    count = 0
    for router in sorted(work.routers):
        try:
            answer = await bus.request(
                subjects.describe_reservations(router), DescribeReservations(router=0), LOOK_SECONDS
            )
        except BusError:
            work.routers.discard(router)
            continue
        if isinstance(answer, ReservationsDescribed):
            count += sum((booking.worker_id, booking.rank) in targets for booking in answer.booked)
    return count


def _state(work: _RemainingWork, booked: int, place: DrainTarget) -> tuple[bool, str]:
    """Return whether the target is idle, and its state as text."""
    loads = place.engine.joined.capabilities.load
    silent = [rank for rank in place.ranks if rank not in work.running] if loads else []
    if silent:
        return False, f"no load report of rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} yet"
    if not loads and not work.routers:
        return False, "it reports no load, and no router reports bookings: what runs there is unknown"
    running = sum(work.running.get(rank, 0) for rank in place.ranks)
    quiet = not loads or all(work.quiet.get(rank, 0) >= QUIET_REPORTS for rank in place.ranks)
    return (
        quiet and not booked,
        (
            f"{running} running or waiting, {booked} booked by routers"
            if running or booked or not quiet
            else "idle"
        ),
    )


async def _store(
    bus: Bus, subjects: Subjects, engine: EngineNow, rank: int | None, *, draining: bool, reason: str
) -> None:
    event = RankDrained(
        engine=engine.joined.engine,
        worker_id=engine.joined.worker_id,
        rank=rank,
        draining=draining,
        reason=reason,
    )
    await bus.record(subjects.drains(engine.joined.engine, rank), event)


def _targets(engine: EngineNow) -> int:
    """Number of ranks that can be drained singly; 1 for an engine whose ranks form one target."""
    joined = engine.joined
    layout = joined.layout
    one_url = not joined.rank_header and len(set(joined.urls)) == 1
    return 1 if one_url or (layout is not None and not layout.targets_are_ranks) else len(joined.urls)
