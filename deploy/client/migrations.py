"""Migrations over the bus: send the request to the planner, then follow its progress."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from bus import Bus, BusTimeout, Declined, Message, Received, Subscription
from bus.protocol.subjects import Subjects
from deploy.client.fleet_status import members
from deploy.process import alongside
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import ApplyMap, ApplyPlan, MigrateExpert, MigrationAccepted, RollBack, SetLayout
from migration.model.plan_log import ProgressEntry, RunProgress

ASK_SECONDS = 15.0
"""Time limit for the planner to check a request."""
TAKEOVER_SECONDS = 8.0
"""Time in which a crashed planner restarts or another one becomes leader."""
QUIET_SECONDS = 15.0
"""Time without news of a plan after which the user is informed."""
BEFORE_SECONDS = 60.0
"""Messages stored this long before a request belong to other plans."""
Order = MigrateExpert | ApplyMap | ApplyPlan | RollBack | SetLayout
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


@dataclass(slots=True, kw_only=True)
class PlanProgress(RunProgress):
    """Progress of a requested plan, also within the current handover."""

    accepted: MigrationAccepted
    by_transfer: Counter[str] = field(default_factory=Counter)
    """bytes"""
    ranks: dict[int, HandoverDescribed] = field(default_factory=dict)
    """stage of each rank in the current handover"""
    messages: int = 0
    """number of messages received about it"""

    def note(self, message: Message) -> str | None:
        """Apply a message. Returns a line of text, unless the message is only a rank's progress."""
        if isinstance(message, HandoverDescribed) and message.worker_id == self.accepted.worker_id:
            self.messages += 1
            before = self.pending
            self.ranks[message.rank] = message
            return f"pending: {self.pending}" if self.pending not in ("", before) else None
        if not isinstance(message, MigrationPlanned | ProgressEntry) or message.plan != self.accepted.plan:
            return None
        self.messages += 1
        if isinstance(message, MigrationPlanned):
            return f"under way: {message.reason}" if message.reason else None
        if not self.apply(message):
            return None
        handover = f"handover {message.number + 1} of {self.accepted.handovers}"
        match message:
            case MigrationStaged():
                for pull in message.pulls:
                    self.by_transfer[pull.transfer] += pull.bytes
                return f"{handover}: staged on all ranks after {message.seconds:.2f} s"
            case MigrationCommitted():
                self.ranks.clear()
                return (
                    f"{handover}: epoch {message.epoch} is served,"
                    f" {1e3 * message.commit_seconds:.0f} ms after the decision"
                )
        return None

    @property
    def pulled(self) -> int:
        """Return the bytes copied so far, including the current handover."""
        open_ones = (rank for rank in self.ranks.values() if rank.handover)
        return self.copied_bytes + sum(pull.bytes for rank in open_ones for pull in rank.pulls)

    @property
    def pending(self) -> str:
        """State what decided ranks of an engine that rearranges wait for (`HandoverDescribed.pending`)."""
        return ", ".join(sorted({status.pending for status in self.ranks.values()} - {""}))

    @property
    def present(self) -> str:
        """Return the current stage in a few words, for any number of ranks."""
        by_state: dict[str, list[int]] = {}
        for rank, status in sorted(self.ranks.items()):
            by_state.setdefault(status.state, []).append(rank)
        where = ", ".join(
            f"rank {ranks[0]} {state}" if len(ranks) == 1 else f"{len(ranks)} ranks {state}"
            for state, ranks in by_state.items()
        )
        number = f"handover {min(self.next + 1, self.accepted.handovers)} of {self.accepted.handovers}"
        pending = f", pending: {self.pending}" if self.pending else ""
        return (f"{number}: {where}" if where else number) + pending


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
    async with bus.subscribe(subjects.handovers()) as reports:
        progress = PlanProgress(accepted=await _accepted(bus, subjects, order, say))
        began(progress)
        if wait and progress.accepted.handovers:
            async with (
                alongside(_listen(reports, progress, say), "follow the progress of ranks"),
                alongside(_report_silence(progress, say), "notice silence"),
            ):
                await _follow(bus, subjects, progress, known, say)
    return progress


async def preview(
    bus: Bus, subjects: Subjects, order: MigrateExpert | ApplyMap | SetLayout, say: Say
) -> MigrationAccepted:
    """Return what the planner would do for a request, of which nothing is done. Raises NotAccepted when it
    refuses or does not answer."""
    return await _accepted(bus, subjects, msgspec.structs.replace(order, dry_run=True), say)


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
    bus: Bus, subjects: Subjects, progress: PlanProgress, known: set[tuple[int, int]], say: Say
) -> None:
    """Follow the stored log, across reconnects. A plan of the same id may have been carried out before."""
    async with aclosing(_stored(bus, subjects, progress)) as stored:
        async for received in stored:
            if _identity(received) not in known and (words := progress.note(received.message)):
                say(words)
            if progress.end is not None:
                return


async def _stored(bus: Bus, subjects: Subjects, progress: PlanProgress) -> AsyncGenerator[Received, None]:
    async for received in bus.replay(subjects.migrations(progress.accepted.engine), since=BEFORE_SECONDS):
        yield received


async def _listen(reports: Subscription, progress: PlanProgress, say: Say) -> None:
    async for received in reports:
        if words := progress.note(received.message):
            say(words)


async def _report_silence(progress: PlanProgress, say: Say) -> None:
    while True:
        before = progress.messages
        await asyncio.sleep(QUIET_SECONDS)
        if progress.messages == before:
            say(
                f"{progress.present}; nothing new for {QUIET_SECONDS:g} s. Large experts take this long;"
                " otherwise check that the planner is running"
            )


def _identity(received: Received) -> tuple[int, int]:
    return received.publisher_id, received.sequence
