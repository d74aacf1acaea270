"""Handovers of an engine that moves its experts itself, over the bus: handle the coordinator's commands for
every expert rank, and publish the status of each.

`engine_adapter.handover.vote_protocol` decides. This module executes its decisions through a `Rearranger`,
which reaches the engine's worker processes. Nothing here stops the engine. Messages from the bus are
validated and rejected if wrong.
"""

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack

import msgspec

from bus import Bus, Message
from bus.mailbox import Answer
from bus.protocol.subjects import Subjects
from engine_adapter.engine import Rearranger
from engine_adapter.handover.vote_protocol import Drop, NotConnected, Nudge, Permit, Stage, VoteProtocol
from fleet.handover import CommandVerdict
from fleet.placement import Placement
from fleet.requests.engines import DescribeMemory
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    HandoverDescribed,
    ProposeHandover,
)

TICK_SECONDS = 0.001
"""A timer may fire slightly early. Without this margin, the loop would wake up repeatedly with nothing to
do."""
log = logging.getLogger(__name__)


class RearrangementAgent:
    """Handover agent of all expert ranks of one engine. `run` serves until it is cancelled."""

    def __init__(
        self, bus: Bus, subjects: Subjects, engine: str, worker_id: int, rearranger: Rearranger
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._engine = engine
        self._worker_id = worker_id
        self._rearranger = rearranger
        self._protocol = VoteProtocol(worker_id=worker_id, placement=rearranger.placement)
        self._publisher = bus.publisher(subjects.handovers(engine))
        self._published: dict[int, HandoverDescribed] = {}
        """By rank: last published status, without its durations."""
        self._due = asyncio.Event()
        self._nudging: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for rank in range(self._rearranger.ranks):
                subject = self._subjects.handover(self._engine, self._worker_id, rank)
                await stack.enter_async_context(self._bus.serve(subject, self._answering(rank)))
            tasks.create_task(self._watch(), name=f"watch the workers of {self._engine}")
            await self._run_protocol(tasks)

    async def _watch(self) -> None:
        while True:
            await self._rearranger.changed()
            self._due.set()

    async def _run_protocol(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the workers, advance the protocol's time, and publish every change of a rank's status."""
        while True:
            self._follow()
            self._protocol.tick(_now())
            self._carry_out(tasks)
            await self._publish()
            wakes = self._protocol.wakes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if wakes == float("inf") else wakes + TICK_SECONDS):
                    await self._due.wait()
            self._due.clear()

    def _follow(self) -> None:
        workers = self._rearranger
        self._protocol.placement, self._protocol.fault = workers.placement, workers.fault
        self._protocol.update([workers.status(rank) for rank in range(workers.ranks)], _now())

    async def _publish(self) -> None:
        for rank in range(self._rearranger.ranks):
            try:
                described = self._protocol.describe(rank, _now())
            except NotConnected:
                continue
            steady = msgspec.structs.replace(described, seconds=0.0)
            before = self._published.get(rank)
            if steady == before:
                continue
            self._published[rank] = steady
            _log_change(before, described)
            await self._publisher.publish(described)

    def _carry_out(self, tasks: asyncio.TaskGroup) -> None:
        for effect in self._protocol.drain():
            match effect:
                case Stage():
                    self._rearranger.stage(effect.rank, effect.handover, effect.placement)
                case Permit():
                    self._rearranger.permit(effect.rank, effect.handover)
                case Drop():
                    self._rearranger.drop(effect.rank, effect.handover, effect.reason)
                case Nudge():
                    self._nudge(tasks)

    def _nudge(self, tasks: asyncio.TaskGroup) -> None:
        if self._nudging is None or self._nudging.done():
            log.info("the workers of %s vote, but the engine makes no steps", self._engine)
            self._nudging = tasks.create_task(self._rearranger.nudge(), name=f"nudge {self._engine}")

    # commands of the coordinator

    def _answering(self, rank: int) -> Answer:
        async def answer(request: Message) -> Message:
            match request:
                case ProposeHandover() | CommitHandover() | AbortHandover() | DescribeHandover():
                    if (request.worker_id, request.rank) != (self._worker_id, rank):
                        raise ValueError(
                            f"this is expert rank {rank} of worker {self._worker_id}, not rank {request.rank}"
                            f" of worker {request.worker_id}"
                        )
                    return await self._obey(request)
                case DescribeMemory():
                    raise ValueError(
                        f"{self._engine} moves its experts itself, and does not state the memory that it uses"
                    )
            raise TypeError(f"expected a command about handovers, got {type(request).__name__}")

        return answer

    async def _obey(
        self, request: ProposeHandover | CommitHandover | AbortHandover | DescribeHandover
    ) -> HandoverDescribed:
        placement: Placement | str = ""
        if isinstance(request, ProposeHandover) and (
            self._protocol.verdict_on_proposal(request) is CommandVerdict.TAKE
        ):  # Validating a large table takes milliseconds.
            placement = await asyncio.to_thread(_read_placement, request)
        self._follow()
        verdict: CommandVerdict | None = None
        match request:
            case ProposeHandover():
                verdict = self._protocol.propose(request, placement, _now())
            case CommitHandover():
                verdict = self._protocol.commit(request)
            case AbortHandover():
                verdict = self._protocol.abort(request)
            case DescribeHandover():
                self._protocol.status_requested(request.rank, request.token)
        self._due.set()
        return self._protocol.describe(request.rank, _now(), verdict)


def _read_placement(command: ProposeHandover) -> Placement | str:
    """Decode the placement of a proposal. Return the error text when it is invalid."""
    try:
        return Placement.from_record(command.placement)
    except ValueError as error:
        return str(error)


def _log_change(before: HandoverDescribed | None, now: HandoverDescribed) -> None:
    """Log what happened to the handover of a rank."""
    if before is None or before.state != now.state:
        about = f": {now.failure}" if now.failure else ""
        log.info(
            "expert rank %d is %s, handover %d, epoch %d%s",
            now.rank,
            now.state,
            now.handover or now.concluded,
            now.served,
            about,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
