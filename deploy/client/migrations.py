"""Migrations over the bus: send the request to the planner, then follow its progress."""

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
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import ApplyPlan, MigrateExpert, MigrationAccepted, RollBack

ASK_SECONDS = 15.0
"""Time limit for the planner to check a request."""
TAKEOVER_SECONDS = 8.0
"""Time in which a crashed planner restarts or another one becomes leader."""
QUIET_SECONDS = 15.0
"""Time without news of a plan after which the user is informed."""
BEFORE_SECONDS = 60.0
"""Messages stored this long before a request belong to other plans."""
Order = MigrateExpert | ApplyPlan | RollBack
Say = Callable[[str], None]


class NoSuchEngine(Exception):
    """Unknown or ambiguous engine name; the text lists the engines."""


class NotAccepted(Exception):
    """Raised when the planner refuses a request; carries the planner's reason."""


async def engine_named(bus: Bus, subjects: Subjects, text: str | None) -> EngineJoined:
    """Resolve a full or short engine name (`e0` for engine-0); None: the only engine with experts. Raises
    NoSuchEngine."""
    there = {
        now.joined.engine: now.joined for now in await members(bus, subjects) if now.joined.shape is not None
    }
    fits = (
        list(there)
        if text is None
        else [name for name in there if name == text] or [name for name in there if in_short(name) == text]
    )
    if len(fits) == 1:
        return there[fits[0]]
    names = ", ".join(sorted(there)) or "none"
    if text is None:
        raise NoSuchEngine(
            f"name an engine; there are: {names}"
            if there
            else "no engine with experts has joined; start one first"
        )
    raise NoSuchEngine(
        f"{text!r} is short for {', '.join(sorted(fits))}: say which"
        if fits
        else f"no engine {text!r} with experts; there are: {names}"
    )


def in_short(name: str) -> str:
    """Return the short name: first letters of the words, then the number: e0 for engine-0."""
    return "".join(word if word.isdigit() else word[0] for word in re.findall(r"[A-Za-z]+|\d+", name))


@dataclass(slots=True)
class PlanProgress:
    """Progress of one plan. `done`: completed handovers; `ranks`: stage of each rank in the current
    handover."""

    accepted: MigrationAccepted
    done: int = 0
    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """duration of its handovers, each from proposal to the last flip"""
    epoch: int | None = None
    """epoch served since the last completed handover"""
    by_transfer: Counter[str] = field(default_factory=Counter)
    """bytes"""
    ranks: dict[int, HandoverDescribed] = field(default_factory=dict)
    given_up: MigrationAborted | None = None
    over: bool = False
    heard: int = 0
    """messages received about it"""

    def note(self, message: Message) -> str | None:
        """Apply a message. Returns a line of text, unless the message is only a rank's progress."""
        if isinstance(message, HandoverDescribed) and message.worker_id == self.accepted.worker_id:
            self.heard += 1
            self.ranks[message.rank] = message
            return None
        if (
            not isinstance(
                message, MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted
            )
            or message.plan != self.accepted.plan
        ):
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
        return (
            f"handover {message.number + 1} of {self.accepted.handovers}: staged on all ranks after"
            f" {message.seconds:.2f} s"
        )

    def _committed(self, message: MigrationCommitted) -> str:
        self.done, self.epoch, self.over = message.number + 1, message.epoch, message.last
        self.copies += message.copies
        self.bytes += message.bytes
        self.seconds += message.seconds
        self.ranks.clear()
        return (
            f"handover {self.done} of {self.accepted.handovers}: epoch {message.epoch} is served,"
            f" {1e3 * message.commit_seconds:.0f} ms after the decision"
        )

    @property
    def pulled(self) -> int:
        """Return the bytes copied so far, including the current handover."""
        open_ones = (rank for rank in self.ranks.values() if rank.handover)
        return self.bytes + sum(pull.bytes for rank in open_ones for pull in rank.pulls)

    @property
    def present(self) -> str:
        """Return the current stage in a few words, for any number of ranks."""
        by_state: dict[str, list[int]] = {}
        for rank, told in sorted(self.ranks.items()):
            by_state.setdefault(told.state, []).append(rank)
        where = ", ".join(
            f"rank {ranks[0]} {state}" if len(ranks) == 1 else f"{len(ranks)} ranks {state}"
            for state, ranks in by_state.items()
        )
        return f"handover {min(self.done + 1, self.accepted.handovers)} of {self.accepted.handovers}" + (
            f": {where}" if where else ""
        )


async def carried_out(
    bus: Bus, subjects: Subjects, order: Order, *, wait: bool, began: Callable[[PlanProgress], None], say: Say
) -> PlanProgress:
    """Send a request to the planner; with `wait`, return when the plan has ended in any way.

    began: called once the request is accepted. say: called with every event as text. Raises NotAccepted when
    the planner refuses or does not answer.
    """
    known = {
        _identity(one)
        async for one in bus.replay(subjects.migrations(order.engine), since=BEFORE_SECONDS, follow=False)
    }
    async with bus.subscribe(subjects.handovers()) as heard:
        course = PlanProgress(await _accepted(bus, subjects, order, say))
        began(course)
        if wait:
            async with (
                alongside(_listen(heard, course), "follow the progress of ranks"),
                alongside(_wonder(course, say), "notice silence"),
            ):
                await _follow(bus, subjects, course, known, say)
    return course


async def _accepted(bus: Bus, subjects: Subjects, order: Order, say: Say) -> MigrationAccepted:
    """Send the request. The bus reports immediately if no planner listens; then retry while one may take
    over."""
    clock = asyncio.get_running_loop().time
    began, patience = clock(), min(TAKEOVER_SECONDS, ASK_SECONDS)
    while True:
        try:
            answer = await bus.request(subjects.migrate, order, ASK_SECONDS)
        except BusTimeout as error:
            if clock() - began >= patience:
                why = (
                    "is it running? If it only hangs, it may still carry out the request; see roost events"
                    " --kind migration"
                )
                raise NotAccepted(f"the planner does not answer ({error}): {why}") from error
            say("no planner is running; waiting for one to take over")
            await asyncio.sleep(patience / 4)
        except Declined as error:
            raise NotAccepted(str(error)) from error
        else:
            break
    if not isinstance(answer, MigrationAccepted):
        raise NotAccepted(
            f"the planner answered with {type(answer).__name__}; is it of another version of Roost?"
        )
    return answer


async def _follow(
    bus: Bus, subjects: Subjects, course: PlanProgress, known: set[tuple[int, int]], say: Say
) -> None:
    """Follow the stored log, across reconnects. A plan of the same id may have been carried out before."""
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
            say(
                f"{course.present}; nothing new for {QUIET_SECONDS:g} s. Large experts take this long;"
                " otherwise check that the planner is running"
            )


def _identity(received: Received) -> tuple[int, int]:
    return received.publisher_id, received.sequence
