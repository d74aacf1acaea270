"""Ranks that follow the tables of `fleet.handover`, without weights. They can be configured to misbehave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from bus import Bus, Message
from bus.mailbox import Answer
from bus.protocol.subjects import Subjects
from fleet.facts.engines import EngineHeartbeat
from fleet.facts.migrations import PullReport
from fleet.handover import (
    CommandVerdict,
    ProtocolState,
    RankState,
    aborted,
    committed,
    flipped,
    handle_abort,
    handle_commit,
    handle_propose,
    proposed,
    staged,
    with_token,
)
from fleet.placement import Placement
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    HandoverDescribed,
    ProposeHandover,
)
from fleet.requests.refusal import RequestRefused


class Ranks:
    """Ranks of one engine. `served` lists every epoch served by all ranks at once: they flip together."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        placement: Placement,
        *,
        engine: str = "a",
        worker_id: int = 1,
        free: int = 4,
    ) -> None:
        self.placement = placement
        self.standing = [ProtocolState(RankState.SERVING, placement.epoch) for _ in range(placement.ranks)]
        self.served = [placement.epoch]
        self.commands: list[tuple[int, Message]] = []
        """(rank, command), in order of arrival"""
        self.fails: dict[int, tuple[str, str]] = {}
        """by rank: reason why it cannot stage, and the fault code"""
        self.silent: set[int] = set()
        self.unable = ""
        """reason why no rank takes part in handovers"""
        self.mute = False
        """True: nothing is published, ranks only answer requests"""
        self.stage_seconds = 0.05
        self.alive = True
        self.free = free
        self.draining = 0
        self._bus, self._subjects, self._engine, self._worker_id = bus, subjects, engine, worker_id
        self._voice = bus.publisher(subjects.handovers(engine))
        self._heart = bus.publisher(subjects.heartbeats(engine))
        self._failures: dict[int, tuple[str, str]] = {}
        self._proposed: dict[int, Placement] = {}
        self._staging: dict[int, asyncio.Task[None]] = {}
        self._awaited: tuple[type[Message], asyncio.Event] | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Ranks"]:
        async with AsyncExitStack() as stack:
            for rank in range(self.placement.ranks):
                await stack.enter_async_context(
                    self._bus.serve(
                        self._subjects.handover(self._engine, self._worker_id, rank), self._answering(rank)
                    )
                )
            beating = asyncio.create_task(self._beat())
            try:
                yield self
            finally:
                for task in (beating, *self._staging.values()):
                    task.cancel()

    async def commands_to(self, command: type[Message]) -> None:
        """Wait until a rank has received such a command."""
        self._awaited = (command, asyncio.Event())
        await self._awaited[1].wait()

    def kill(self) -> None:
        """Stop the ranks without any further message."""
        self.alive = False

    async def _beat(self) -> None:
        while True:
            if self.alive:
                await self._heart.publish(
                    EngineHeartbeat(engine=self._engine, worker_id=self._worker_id, epoch=self.served[-1])
                )
            await asyncio.sleep(1)

    def _answering(self, rank: int) -> Answer:
        async def answer(message: Message) -> Message:
            if rank in self.silent or not self.alive:
                await asyncio.sleep(5)
                return self.described(rank)  # no receiver: the request has timed out
            if self.unable:
                return RequestRefused(reason=self.unable)
            self.commands.append((rank, message))
            if self._awaited is not None and isinstance(message, self._awaited[0]):
                self._awaited[1].set()
            return self._obey(rank, message)

        return answer

    def _obey(self, rank: int, message: Message) -> Message:
        if isinstance(message, ProposeHandover | CommitHandover | AbortHandover):
            self.standing[rank] = with_token(self.standing[rank], message.token)
        now = self.standing[rank]
        match message:
            case ProposeHandover():
                verdict = handle_propose(now, message.token, message.handover, message.placement.epoch)
                if verdict is CommandVerdict.TAKE:
                    self.standing[rank] = proposed(now, message.token, message.handover)
                    self._proposed[rank] = Placement.from_record(message.placement)
                    self._staging[rank] = asyncio.create_task(self._stage(rank))
            case CommitHandover():
                verdict = handle_commit(now, message.token, message.handover)
                if verdict is CommandVerdict.TAKE:
                    self.standing[rank] = committed(now, message.token)
                    self._flip()
            case AbortHandover():
                verdict = handle_abort(now, message.token, message.handover)
                if verdict is CommandVerdict.TAKE:
                    self.standing[rank] = aborted(now, message.token, message.handover)
                    if rank in self._staging:
                        self._staging[rank].cancel()
            case DescribeHandover():
                return self.described(rank)
            case _:
                raise AssertionError(message)
        return self.described(rank, str(verdict))

    async def _stage(self, rank: int) -> None:
        await asyncio.sleep(self.stage_seconds)
        self._failures.pop(rank, None)
        if rank in self.fails:
            self._failures[rank] = self.fails[rank]
        self.standing[rank] = staged(self.standing[rank], failed=rank in self.fails)
        await self._report(rank)

    def _flip(self) -> None:
        if all(standing.state is RankState.READY for standing in self.standing):
            self.standing = [flipped(standing) for standing in self.standing]
            (self.placement,) = set(self._proposed.values())
            self.served.append(self.placement.epoch)
            self._staging[-1] = asyncio.create_task(self._report_all())

    async def _report_all(self) -> None:
        for rank in range(len(self.standing)):
            await self._report(rank)

    async def _report(self, rank: int) -> None:
        if self.alive and not self.mute and rank not in self.silent:
            await self._voice.publish(self.described(rank))

    def described(self, rank: int, verdict: str = "") -> HandoverDescribed:
        now = self.standing[rank]
        failure, fault = self._failures.get(rank, ("", "")) if now.state is RankState.FAILED else ("", "")
        return HandoverDescribed(
            worker_id=self._worker_id,
            rank=rank,
            state=now.state,
            served=now.served,
            token=now.token,
            handover=now.handover,
            concluded=now.concluded,
            flipped=now.flipped,
            verdict=verdict,
            failure=failure,
            fault=fault,
            pulls=(
                (PullReport(source=0, transfer="memory", experts=1, bytes=384, seconds=0.01),)
                if now.state is RankState.STAGED
                else ()
            ),
            free=self.free,
            draining=self.draining,
        )
