"""Driver of one handover: sends its commands, feeds reports to `migration.handover.coordinator`, persists its
transitions.

Several handovers run at a time, at most one per engine. Nothing is sent while another service may be the
leader.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from bus import Bus, BusError, Declined
from bus.protocol.subjects import Subjects
from fleet.handover import CoordinatorState
from fleet.requests.handovers import DescribeHandover, HandoverDescribed
from fleet.text import listed
from migration.execution.leader_lease import LeaderLease
from migration.execution.migration_log import MigrationLog
from migration.handover.coordinator import Command, HandoverState, Transition
from migration.handover.rank_progress import DECLINED, OVERDUE, HandoverFailure
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import HandoverTrace

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Longest interval between checks for the presence of the engine and for the lead."""
ANSWER_SECONDS = 2.0
"""Time limit for one answer of a rank. It exceeds the resend interval, so that slow answers are still
received."""
_PAUSE_SECONDS = 0.25
MIN_WAIT_SECONDS = 0.001
"""Shortest wait: clocks are not exact, and a wait of zero never ends."""
MAX_NUMBER = 1 << 53
"""Upper bound on any number that a rank reports; larger ones are invalid."""

Gone = Callable[[str, int], str]
"""(engine, worker_id) -> reason why that incarnation has ended; empty: there is no proof that it has"""
MAX_REPORTS = 4096
"""Limit on queued rank reports; a rank is asked again if a report is lost."""


class CommandsRefused(NamedTuple):
    """Refusal of a rank to accept any commands."""

    rank: int
    reason: str


RankReport = HandoverDescribed | CommandsRefused


class Unfit(Exception):
    """Error: a rank of an engine cannot begin a handover now."""

    def __init__(self, failure: HandoverFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class HandoverDriver:
    """Used on one event loop.

    silent: returns True if the heartbeats of a worker_id are missing. clock: monotonic seconds.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        log: MigrationLog,
        lead: LeaderLease,
        metrics: MigrationMetrics,
        gone: Gone,
        silent: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._log = log
        self._lead = lead
        self._metrics = metrics
        self._gone = gone
        self._silent = silent
        self._clock = clock
        self._inboxes: dict[int, asyncio.Queue[RankReport]] = {}
        """by worker_id"""

    def receive(self, report: HandoverDescribed) -> None:
        """Receive an unsolicited status report of a rank."""
        if (inbox := self._inboxes.get(report.worker_id)) is not None and not inbox.full():
            inbox.put_nowait(report)

    async def survey(
        self, engine: str, worker_id: int, ranks: int, patience: float, token: int
    ) -> tuple[HandoverDescribed, ...]:
        """Return the status of every rank. Raises Unfit naming the first that does not answer within
        `patience` seconds."""
        until = self._clock() + patience
        answers = await asyncio.gather(
            *(self._status_of(engine, worker_id, rank, until, token) for rank in range(ranks))
        )
        for answer in answers:
            if isinstance(answer, HandoverFailure):
                raise Unfit(answer)
        return tuple(answer for answer in answers if isinstance(answer, HandoverDescribed))

    async def drive(
        self, handover: HandoverState, revision: int | None, trace: HandoverTrace | None = None
    ) -> HandoverState:
        """Drive a handover until it ends.

        Raises Superseded if another service changed its durable state, and LeaseTaken if another service is
        the leader.
        """
        with self._inbox(handover.what.worker_id) as inbox:
            overdue = False
            async with _requests() as start:
                while handover.state is not CoordinatorState.IDLE:
                    await self._lead.until_leading()
                    handover, now = await self._observe(handover), self._clock()
                    overdue = self._check_overdue(handover, now, before=overdue)
                    transition = handover.next_transition(now)
                    if transition is not None:
                        handover, revision = await self._persist_transition(
                            handover, transition, revision, now
                        )
                        if trace is not None:
                            trace.transition(handover, transition)
                        continue
                    for rank, command in handover.due(now):
                        start(
                            self._send(inbox, handover.what.engine, rank, command),
                            f"send a command to rank {rank} of engine {handover.what.engine}",
                        )
                        handover = handover.commanded((rank,), now)
                    handover = await self._listen(inbox, handover)
        return handover

    async def _observe(self, handover: HandoverState) -> HandoverState:
        """Apply the presence of the engine, and outbid a higher fencing token that a rank reported."""
        what = handover.what
        if why := self._gone(what.engine, what.worker_id):
            handover = handover.gone(why)
        else:
            handover = handover.checked(silent=self._silent(what.worker_id))
        if handover.highest_token > handover.token:
            try:
                handover = handover.with_token(await self._lead.outbid(handover.highest_token))
            except BusError as error:
                logger.warning(
                    "a rank of engine %s has seen token %d: %s", what.engine, handover.highest_token, error
                )
        return handover

    async def _persist_transition(
        self, handover: HandoverState, transition: Transition, revision: int | None, now: float
    ) -> tuple[HandoverState, int]:
        """Write the records of a transition, then persist the new state."""
        for entry in transition.records:
            await self._log.record(entry)
        kept = await self._log.keep(handover.what.engine, handover.durable(transition.after, now), revision)
        after = handover.with_transition(transition, now)
        logger.info(
            "handover %d of engine %s: %s, %s",
            after.what.handover,
            after.what.engine,
            transition.event,
            after.state,
        )
        self._metrics.transition(after, transition, now)
        return after, kept

    def _check_overdue(self, handover: HandoverState, now: float, *, before: bool) -> bool:
        """Return True if a decided handover is overdue. A warning is logged once."""
        overdue, what = handover.overdue(now), handover.what
        self._metrics.overdue(what.engine, overdue)
        if overdue and not before:
            waiting = listed(handover.waiting_for)
            logger.warning(
                "handover %d of engine %s is decided, but ranks %s do not serve it yet; resending the commit",
                what.handover,
                what.engine,
                waiting,
            )
        return overdue

    async def _listen(self, inbox: asyncio.Queue[RankReport], handover: HandoverState) -> HandoverState:
        """Wait for reports until the next action is due, and apply them."""
        now = self._clock()
        try:
            async with asyncio.timeout(
                min(max(handover.next_look(now) - now, MIN_WAIT_SECONDS), LOOK_SECONDS)
            ):
                reports = [await inbox.get()]
        except TimeoutError:
            return handover
        while not inbox.empty():
            reports.append(inbox.get_nowait())
        for report in reports:
            handover = (
                handover.declined(report.rank, report.reason)
                if isinstance(report, CommandsRefused)
                else handover.reported(report)
            )
        return handover

    async def _send(self, inbox: asyncio.Queue[RankReport], engine: str, rank: int, command: Command) -> None:
        try:
            answer = await self._request(engine, command, rank)
        except Declined as refusal:
            await inbox.put(CommandsRefused(rank, str(refusal)))
        except BusError as error:
            logger.debug("rank %d does not answer a %s: %s", rank, type(command).__name__, error)
        else:
            await inbox.put(answer)

    async def _request(self, engine: str, command: Command, rank: int) -> HandoverDescribed:
        answer = await self._bus.request(
            self._subjects.handover(engine, command.worker_id, rank), command, ANSWER_SECONDS
        )
        if not isinstance(answer, HandoverDescribed) or (answer.worker_id, answer.rank) != (
            command.worker_id,
            rank,
        ):
            raise Declined(
                f"its answer is an unexpected {type(answer).__name__}; do both sides run the same version?"
            )
        if not plausible(answer):
            raise Declined(
                f"it reports the invalid handover {answer.handover} or token {answer.token}; restart its"
                " engine"
            )
        return answer

    async def _status_of(
        self, engine: str, worker_id: int, rank: int, until: float, token: int
    ) -> HandoverDescribed | HandoverFailure:
        while True:
            try:
                return await self._request(
                    engine, DescribeHandover(worker_id=worker_id, rank=rank, token=token), rank
                )
            except Declined as refusal:
                return HandoverFailure(f"rank {rank} takes part in no handover: {refusal}", DECLINED, rank)
            except BusError as error:
                logger.debug("rank %d does not report its status: %s", rank, error)
                if self._clock() >= until:
                    return HandoverFailure(
                        f"rank {rank} does not answer; see its log (roost status shows the state of its"
                        " engine)",
                        OVERDUE,
                        rank,
                    )
            await asyncio.sleep(_PAUSE_SECONDS)

    @contextmanager
    def _inbox(self, worker_id: int) -> Iterator[asyncio.Queue[RankReport]]:
        """Collect the reports of one engine meanwhile."""
        inbox: asyncio.Queue[RankReport] = asyncio.Queue(MAX_REPORTS)
        self._inboxes[worker_id] = inbox
        try:
            yield inbox
        finally:
            del self._inboxes[worker_id]


@asynccontextmanager
async def _requests() -> AsyncIterator[Callable[[Coroutine[Any, Any, None], str], None]]:
    """Start requests as named tasks. Requests still unanswered at the end are cancelled."""
    running = set[asyncio.Task[None]]()

    def start(request: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(request, name=name)
        running.add(task)
        task.add_done_callback(running.discard)

    try:
        yield start
    finally:
        for task in tuple(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def plausible(report: HandoverDescribed) -> bool:
    """Return True if the numbers in a report are plausible, because tokens and handover numbers are derived
    from them."""
    numbers = (report.handover, report.concluded, report.flipped, report.token, report.served, report.rank)
    return all(0 <= number <= MAX_NUMBER for number in numbers)


def stray(statuses: Sequence[HandoverDescribed]) -> tuple[int, CoordinatorState] | None:
    """Return the handover that ranks have open but that is not in durable storage, and how to finish it;
    None: none.

    It was decided if any rank is ready or has flipped; otherwise it is aborted.
    """
    handover = max((status.handover for status in statuses), default=0)
    if not handover:
        return None
    decided = any(
        status.flipped == handover or (status.handover == handover and status.state == "ready")
        for status in statuses
    )
    return handover, CoordinatorState.COMMITTING if decided else CoordinatorState.ABORTING
