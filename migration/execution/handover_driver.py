"""Carries one handover to its end: sends what `migration.handover.coordinator` calls for, tells it what is heard, and makes its moves durable.

Several engines' handovers are carried at a time, one of each engine. Nothing is sent while another may lead.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from bus import Bus, BusError, Declined
from bus.protocol.subjects import Subjects
from fleet.events import DescribeHandover, HandoverDescribed
from fleet.handover import CoordinatorState
from migration.execution.leader_lease import LeaderLease
from migration.execution.migration_log import MigrationLog
from migration.handover.coordinator import Command, HandoverState, Move
from migration.handover.rank_progress import DECLINED, OVERDUE, HandoverFailure, listed
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import HandoverTrace

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""The longest that nothing is looked at: whether the engine is there, whether we lead."""
ANSWER_SECONDS = 2.0
"""Wait for one answer of a rank: longer than the time after which it is asked again, so that slow ones are heard too."""
_PAUSE_SECONDS = 0.25
LEAST_SECONDS = 0.001
"""The shortest: clocks are not exact, and waiting for no time at all waits for ever."""
MOST_NUMBER = 1 << 53
"""No number that a rank tells is above it, if it is sane."""

Gone = Callable[[str, int], str]
"""(engine, worker_id) -> why that life of the engine is over; empty: nothing proves that it is"""
MOST_WORDS = 4096
"""Words of ranks that wait to be taken in; each is asked again if one is lost."""


class CommandsRefused(NamedTuple):
    """A rank that takes no commands at all."""

    rank: int
    reason: str


Word = HandoverDescribed | CommandsRefused


class Unfit(Exception):
    """An engine whose ranks cannot begin a handover now."""

    def __init__(self, failure: HandoverFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class HandoverDriver:
    """Used on one event loop. silent: whether a worker_id's heart beats no more. clock: seconds that never go back."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        journal: MigrationLog,
        lead: LeaderLease,
        metrics: MigrationMetrics,
        gone: Gone,
        silent: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._journal = journal
        self._lead = lead
        self._metrics = metrics
        self._gone = gone
        self._silent = silent
        self._clock = clock
        self._inboxes: dict[int, asyncio.Queue[Word]] = {}
        """by worker_id"""

    def hear(self, said: HandoverDescribed) -> None:
        """What a rank says of its own accord."""
        if (inbox := self._inboxes.get(said.worker_id)) is not None and not inbox.full():
            inbox.put_nowait(said)

    async def survey(self, engine: str, worker_id: int, ranks: int, patience: float, token: int) -> tuple[HandoverDescribed, ...]:
        """Where every rank is. Unfit names the first that does not say within so many seconds."""
        until = self._clock() + patience
        answers = await asyncio.gather(*(self._where(engine, worker_id, rank, until, token) for rank in range(ranks)))
        for answer in answers:
            if isinstance(answer, HandoverFailure):
                raise Unfit(answer)
        return tuple(answer for answer in answers if isinstance(answer, HandoverDescribed))

    async def carry(self, proceeding: HandoverState, revision: int | None, trace: HandoverTrace | None = None) -> HandoverState:
        """Until it is over. Superseded when somebody else has changed what is durable of it; LeaseTaken when somebody else leads."""
        with self._inbox(proceeding.what.worker_id) as inbox:
            overdue = False
            async with _asking() as ask:
                while proceeding.state is not CoordinatorState.IDLE:
                    await self._lead.standing()
                    proceeding, now = await self._looked(proceeding), self._clock()
                    overdue = self._told_overdue(proceeding, now, before=overdue)
                    move = proceeding.move(now)
                    if move is not None:
                        proceeding, revision = await self._make(proceeding, move, revision, now)
                        if trace is not None:
                            trace.moved(proceeding, move)
                        continue
                    for rank, command in proceeding.due(now):
                        ask(self._send(inbox, proceeding.what.engine, rank, command), f"tells rank {rank} of engine {proceeding.what.engine} to go on")
                        proceeding = proceeding.asked((rank,), now)
                    proceeding = await self._listen(inbox, proceeding)
        return proceeding

    async def _looked(self, proceeding: HandoverState) -> HandoverState:
        """With what is to be seen from here: whether the engine is there, and whether a rank has heard of a higher token."""
        what = proceeding.what
        if why := self._gone(what.engine, what.worker_id):
            proceeding = proceeding.gone(why)
        else:
            proceeding = proceeding.listened(silent=self._silent(what.worker_id))
        if proceeding.heard_token > proceeding.token:
            try:
                proceeding = proceeding.with_token(await self._lead.outbid(proceeding.heard_token))
            except BusError as error:
                logger.warning("rank of engine %s has heard of token %d: %s", what.engine, proceeding.heard_token, error)
        return proceeding

    async def _make(self, proceeding: HandoverState, move: Move, revision: int | None, now: float) -> tuple[HandoverState, int]:
        """Record, then make durable."""
        for entry in move.records:
            await self._journal.record(entry)
        kept = await self._journal.keep(proceeding.what.engine, proceeding.durable(move.after, now), revision)
        after = proceeding.moved(move, now)
        logger.info("handover %d of engine %s: %s, %s", after.what.handover, after.what.engine, move.cue, after.state)
        self._metrics.moved(after, move, now)
        return after, kept

    def _told_overdue(self, proceeding: HandoverState, now: float, *, before: bool) -> bool:
        """Whether a decided handover takes too long; the log says so once."""
        overdue, what = proceeding.overdue(now), proceeding.what
        self._metrics.overdue(what.engine, overdue)
        if overdue and not before:
            waiting = listed(proceeding.waiting_for)
            logger.warning(
                "handover %d of engine %s is decided, but ranks %s do not serve it yet; they are told until they do", what.handover, what.engine, waiting
            )
        return overdue

    async def _listen(self, inbox: asyncio.Queue[Word], proceeding: HandoverState) -> HandoverState:
        """Take in what was said; wait for it until there is something to do."""
        now = self._clock()
        try:
            async with asyncio.timeout(min(max(proceeding.next_look(now) - now, LEAST_SECONDS), LOOK_SECONDS)):
                words = [await inbox.get()]
        except TimeoutError:
            return proceeding
        while not inbox.empty():
            words.append(inbox.get_nowait())
        for word in words:
            proceeding = proceeding.declined(word.rank, word.reason) if isinstance(word, CommandsRefused) else proceeding.heard(word)
        return proceeding

    async def _send(self, inbox: asyncio.Queue[Word], engine: str, rank: int, command: Command) -> None:
        try:
            answer = await self._ask(engine, command, rank)
        except Declined as refusal:
            await inbox.put(CommandsRefused(rank, str(refusal)))
        except BusError as error:
            logger.debug("rank %d does not answer a %s: %s", rank, type(command).__name__, error)
        else:
            await inbox.put(answer)

    async def _ask(self, engine: str, command: Command, rank: int) -> HandoverDescribed:
        answer = await self._bus.request(self._subjects.handover(engine, command.worker_id, rank), command, ANSWER_SECONDS)
        if not isinstance(answer, HandoverDescribed) or (answer.worker_id, answer.rank) != (command.worker_id, rank):
            raise Declined(f"its answer is a {type(answer).__name__} of something else; do both sides run the same version?")
        if not sane(answer):
            raise Declined(f"it tells of handover {answer.handover} and token {answer.token}, which cannot be; restart its engine")
        return answer

    async def _where(self, engine: str, worker_id: int, rank: int, until: float, token: int) -> HandoverDescribed | HandoverFailure:
        while True:
            try:
                return await self._ask(engine, DescribeHandover(worker_id=worker_id, rank=rank, token=token), rank)
            except Declined as refusal:
                return HandoverFailure(f"rank {rank} takes part in no handover: {refusal}", DECLINED, rank)
            except BusError as error:
                logger.debug("rank %d does not say where it is: %s", rank, error)
                if self._clock() >= until:
                    return HandoverFailure(f"rank {rank} does not answer; see its log (roost status tells whether its engine lives)", OVERDUE, rank)
            await asyncio.sleep(_PAUSE_SECONDS)

    @contextmanager
    def _inbox(self, worker_id: int) -> Iterator[asyncio.Queue[Word]]:
        """What is said of this engine meanwhile."""
        inbox: asyncio.Queue[Word] = asyncio.Queue(MOST_WORDS)
        self._inboxes[worker_id] = inbox
        try:
            yield inbox
        finally:
            del self._inboxes[worker_id]


@asynccontextmanager
async def _asking() -> AsyncIterator[Callable[[Coroutine[Any, Any, None], str], None]]:
    """Starts questions, by name; those that are not answered in the end are let go."""
    asked = set[asyncio.Task[None]]()

    def ask(question: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(question, name=name)
        asked.add(task)
        task.add_done_callback(asked.discard)

    try:
        yield ask
    finally:
        for task in tuple(asked):
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def sane(said: HandoverDescribed) -> bool:
    """Whether its numbers can be: tokens and numbers of handovers are made from them."""
    return all(0 <= number <= MOST_NUMBER for number in (said.handover, said.concluded, said.flipped, said.token, said.served, said.rank))


def stray(told: Sequence[HandoverDescribed]) -> tuple[int, CoordinatorState] | None:
    """The handover that ranks have open though nothing durable knows of it, and what is to become of it: it was decided where any rank is ready or has
    flipped, and else it is given up. None: none is open."""
    handover = max((said.handover for said in told), default=0)
    if not handover:
        return None
    decided = any(said.flipped == handover or (said.handover == handover and said.state == "ready") for said in told)
    return handover, CoordinatorState.COMMITTING if decided else CoordinatorState.ABORTING
