"""Having experts moved: what is asked of the planner, and how it goes, as the bus tells it."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from bus import Bus, BusTimeout, Declined, Message, Received, Subscription
from bus.protocol.subjects import Subjects
from deploy.client.fleet_status import members
from deploy.process import alongside
from fleet.events import (
    ApplyPlan,
    EngineJoined,
    HandoverDescribed,
    MigrateExpert,
    MigrationAborted,
    MigrationAccepted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    RollBack,
)

ASK_SECONDS = 15.0
"""for the planner to check what is asked"""
TAKEOVER_SECONDS = 8.0
"""in which a planner that died is started again, or another one leads"""
QUIET_SECONDS = 15.0
"""without a word about a plan; then that is said"""
BEFORE_SECONDS = 60.0
"""What was stored so long before a request is known to be of others."""
Order = MigrateExpert | ApplyPlan | RollBack
Say = Callable[[str], None]


class NoSuchEngine(Exception):
    """There is no such engine, or more than one; the text says what there is."""


class NotAccepted(Exception):
    """The planner will not do it; its own words."""


async def engine_named(bus: Bus, subjects: Subjects, text: str | None) -> EngineJoined:
    """The engine that a name means, in full or in short (`e0` for engine-0); None: the only one with experts. NoSuchEngine says what there is."""
    there = {now.joined.engine: now.joined for now in await members(bus, subjects) if now.joined.shape is not None}
    fits = list(there) if text is None else [name for name in there if name == text] or [name for name in there if in_short(name) == text]
    if len(fits) == 1:
        return there[fits[0]]
    names = ", ".join(sorted(there)) or "none"
    if text is None:
        raise NoSuchEngine(f"name an engine; there are: {names}" if there else "no engine with experts has joined; start one first")
    raise NoSuchEngine(f"{text!r} is short for {', '.join(sorted(fits))}: say which" if fits else f"no engine {text!r} with experts; there are: {names}")


def in_short(name: str) -> str:
    """The first letters of a name's words and its number: e0 for engine-0."""
    return "".join(word if word.isdigit() else word[0] for word in re.findall(r"[A-Za-z]+|\d+", name))


@dataclass(slots=True)
class PlanProgress:
    """How one plan goes. `done`: its handovers that are; `ranks`: where each rank is with the present one."""

    accepted: MigrationAccepted
    done: int = 0
    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """of its handovers, each from proposal to the last flip"""
    epoch: int | None = None
    """served since the last of them"""
    by_transfer: Counter[str] = field(default_factory=Counter)
    """bytes"""
    ranks: dict[int, HandoverDescribed] = field(default_factory=dict)
    given_up: MigrationAborted | None = None
    over: bool = False
    heard: int = 0
    """messages about it"""

    def note(self, message: Message) -> str | None:
        """Take in what was said; in words, where it is more than a rank's progress."""
        if isinstance(message, HandoverDescribed) and message.worker_id == self.accepted.worker_id:
            self.heard += 1
            self.ranks[message.rank] = message
            return None
        if not isinstance(message, MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted) or message.plan != self.accepted.plan:
            return None
        self.heard += 1
        match message:
            case MigrationPlanned():
                return f"under way: {message.reason}" if message.reason else None
            case MigrationStaged():
                return self._staged(message)
            case MigrationCommitted():
                return self._committed(message)
        self.given_up, self.over = message, True
        return None

    def _staged(self, message: MigrationStaged) -> str:
        for pull in message.pulls:
            self.by_transfer[pull.transfer] += pull.bytes
        return f"handover {message.number + 1} of {self.accepted.handovers}: staged on all ranks after {message.seconds:.2f} s"

    def _committed(self, message: MigrationCommitted) -> str:
        self.done, self.epoch, self.over = message.number + 1, message.epoch, message.last
        self.copies += message.copies
        self.bytes += message.bytes
        self.seconds += message.seconds
        self.ranks.clear()
        return f"handover {self.done} of {self.accepted.handovers}: epoch {message.epoch} is served, {1e3 * message.commit_seconds:.0f} ms after the decision"

    @property
    def pulled(self) -> int:
        """Bytes that were brought so far, those of the present handover included."""
        open_ones = (rank for rank in self.ranks.values() if rank.handover)
        return self.bytes + sum(pull.bytes for rank in open_ones for pull in rank.pulls)

    @property
    def present(self) -> str:
        """Where it is, in a few words, however many ranks there are."""
        by_state: dict[str, list[int]] = {}
        for rank, told in sorted(self.ranks.items()):
            by_state.setdefault(told.state, []).append(rank)
        where = ", ".join(f"rank {ranks[0]} {state}" if len(ranks) == 1 else f"{len(ranks)} ranks {state}" for state, ranks in by_state.items())
        return f"handover {min(self.done + 1, self.accepted.handovers)} of {self.accepted.handovers}" + (f": {where}" if where else "")


async def carried_out(bus: Bus, subjects: Subjects, order: Order, *, wait: bool, began: Callable[[PlanProgress], None], say: Say) -> PlanProgress:
    """Ask for it, and with `wait` return when it is over, whichever way. began: told once it is accepted; say: told of each thing that happens.

    NotAccepted when the planner refuses, or does not answer.
    """
    known = {_identity(one) async for one in bus.replay(subjects.migrations(order.engine), since=BEFORE_SECONDS, follow=False)}
    async with bus.subscribe(subjects.handovers()) as heard:
        course = PlanProgress(await _accepted(bus, subjects, order, say))
        began(course)
        if wait:
            async with alongside(_listen(heard, course), "hear how ranks get on"), alongside(_wonder(course, say), "notice silence"):
                await _follow(bus, subjects, course, known, say)
    return course


async def _accepted(bus: Bus, subjects: Subjects, order: Order, say: Say) -> MigrationAccepted:
    """Where nobody is there to ask, which a bus finds out at once, a planner may be about to take over: it is waited for."""
    clock = asyncio.get_running_loop().time
    began, patience = clock(), min(TAKEOVER_SECONDS, ASK_SECONDS)
    while True:
        try:
            answer = await bus.request(subjects.migrate, order, ASK_SECONDS)
        except BusTimeout as error:
            if clock() - began >= patience:
                why = "is it running? If it only hangs, it may do it yet; roost events --kind migration tells"
                raise NotAccepted(f"the planner does not answer ({error}): {why}") from error
            say("no planner is there; one may be about to take over")
            await asyncio.sleep(patience / 4)
        except Declined as error:
            raise NotAccepted(str(error)) from error
        else:
            break
    if not isinstance(answer, MigrationAccepted):
        raise NotAccepted(f"the planner answered with {type(answer).__name__}; is it of another version of Roost?")
    return answer


async def _follow(bus: Bus, subjects: Subjects, course: PlanProgress, known: set[tuple[int, int]], say: Say) -> None:
    """What is stored tells all, also across reconnects; a plan of the same id may have been carried out before."""
    async with aclosing(_stored(bus, subjects, course)) as stored:
        async for received in stored:
            if _identity(received) not in known and (words := course.note(received.message)):
                say(words)
            if course.over:
                return


async def _stored(bus: Bus, subjects: Subjects, course: PlanProgress) -> AsyncGenerator[Received, None]:
    async for received in bus.replay(subjects.migrations(course.accepted.engine), since=BEFORE_SECONDS):
        yield received


async def _listen(heard: Subscription, course: PlanProgress) -> None:
    async for received in heard:
        course.note(received.message)


async def _wonder(course: PlanProgress, say: Say) -> None:
    while True:
        before = course.heard
        await asyncio.sleep(QUIET_SECONDS)
        if course.heard == before:
            say(f"{course.present}; nothing new for {QUIET_SECONDS:g} s. Where experts are large that is to be expected; else see whether the planner runs")


def _identity(received: Received) -> tuple[int, int]:
    return received.publisher_id, received.sequence
