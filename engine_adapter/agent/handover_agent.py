"""Handovers of one rank over the bus: handle the coordinator's commands, read experts from other ranks, lease
out its own, and publish its status.

`engine_adapter.handover.rank_protocol` decides. This module executes the decisions and reports the results
back. It serves two subjects: the coordinator's commands, and leases for the other ranks of the engine.
Nothing here stops the engine. Messages from the bus are validated and rejected if wrong. A read that fails or
hangs fails its handover, and the engine continues with the epoch before.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from bus import Message
from engine_adapter.agent.copy_runner import CopyRunner, Staging
from engine_adapter.agent.memory_audit import MemoryAudit, resident_checksums
from engine_adapter.agent.memory_report import memory_described
from engine_adapter.engine import Adoption, Engine, EngineFailed, Experts
from engine_adapter.handover.cell_table import CellTable, Requested
from engine_adapter.handover.inbound_copies import Report
from engine_adapter.handover.rank_protocol import Adopt, Effect, Forget, Prepare, RankProtocol
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.parts import CellFormat
from fleet.handover import CommandVerdict
from fleet.placement import Placement
from fleet.requests.engines import DescribeMemory, MemoryDescribed
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    EndLease,
    ExpertsLeased,
    HandoverDescribed,
    LeaseEnded,
    LeaseExperts,
    MemoryAddress,
    ProposeHandover,
)
from fleet.sharding import turned

TICK_SECONDS = 0.001
"""A timer may fire slightly early. Without this margin, the loop would wake up repeatedly with nothing to
do."""
STOP_SECONDS = 0.25
"""Time that an abort waits for the reads it stopped, so that their cells are free when the next proposal
comes."""
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class HandoverAgent:
    """Handover agent of one rank. `run` serves until it is cancelled."""

    def __init__(self, context: RankContext, engine: Engine, staging: Staging) -> None:
        """ValueError for an engine that cannot move its experts."""
        if engine.experts is None or engine.placement is None:
            raise ValueError("this engine cannot move its experts: it takes no part in handovers")
        self._experts: Experts = engine.experts
        self._context = context
        self._worker_id = context.worker_id
        self._rank = context.rank
        self._staging = staging
        self._executor = staging.executor
        self._memory = self._experts.memory
        self._own = own_address(self._memory)
        self._slots = engine.placement.slots_per_rank
        cell_table = CellTable(
            engine.placement, self._rank, self._experts.cells, self._memory.cells, self._memory.parts
        )
        self.protocol = RankProtocol(
            worker_id=self._worker_id,
            rank=self._rank,
            placement=engine.placement,
            cell_table=cell_table,
            tensors=len(self._memory.tensors),
            config=staging.config,
            tp_refusal=context.about.tp_refusal,
        )
        self._publisher = context.bus.publisher(context.subjects.handovers(context.engine))
        self._last_status: HandoverDescribed | None = None
        self._changed = asyncio.Event()
        self._sealed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._copies = CopyRunner(context, self._memory, staging, report=self._report, spawn=self._spawn)
        self._preparing: asyncio.Task[None] | None = None
        self._adoption: Adoption | None = None
        self._busy = False

    async def run(self) -> None:
        """Serve until cancelled. EngineFailed, in a group, when the memory of an expert was changed from
        outside."""
        async with AsyncExitStack() as stack:
            if self._executor is None:
                threads = ThreadPoolExecutor(
                    1, f"checksums-{self._rank}", _lower_priority, (self._staging.config.niceness,)
                )
                self._executor = threads
                stack.callback(threads.shutdown, wait=False, cancel_futures=True)
            self._copies.executor = self._executor
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._tasks = tasks
            stack.callback(self._end)
            tasks.create_task(self._seal(), name=f"checksums of what rank {self._rank} serves")
            bus, subjects, address = self._context.bus, self._context.subjects, self._context.address
            await stack.enter_async_context(bus.serve(subjects.handover(*address), self._command))
            await stack.enter_async_context(bus.serve(subjects.leases(*address), self._answer_reader))
            await self._run_protocol()

    def _end(self) -> None:
        self._tasks = None
        self._copies.end()

    async def _seal(self) -> None:
        """Compute the checksums of all loaded experts. Until then, no lease is granted. Then audit the served
        experts until cancelled. EngineFailed when the audit finds a mismatch."""
        cell_table, form = self.protocol.cell_table, CellFormat.of(self._memory)
        for resident in tuple(cell_table.residents()):
            sums = await self._off_loop(resident_checksums, self._memory, form, resident)
            cell_table.seal(resident, sums)
        self._sealed.set()
        if seconds := self._staging.config.audit_seconds:
            await MemoryAudit(cell_table, self._memory, seconds, self._off_loop).run()

    async def _run_protocol(self) -> None:
        """Advance the protocol's time, and publish the status whenever it changes."""
        clock = asyncio.get_running_loop().time
        while True:
            self.protocol.tick(clock())
            self._carry_out()
            self._notify_backends()
            await self._publish_status(clock())
            wakes = self.protocol.wakes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if wakes == float("inf") else wakes + TICK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()

    async def _publish_status(self, now: float) -> None:
        described = self.protocol.describe(now)
        steady = msgspec.structs.replace(described, seconds=0.0, oldest_seconds=0.0)
        if steady == self._last_status:
            return
        self._last_status = steady
        if self.protocol.at_rest:
            self.protocol.cell_table.check_integrity()
        await self._publisher.publish(described)

    # commands of the coordinator

    async def _command(self, request: Message) -> Message:
        match request:
            case ProposeHandover():
                self._addressed(request.worker_id, request.rank)
                verdict = await self._propose(request)
            case CommitHandover():
                self._addressed(request.worker_id, request.rank)
                verdict = self.protocol.commit(request)
                self._on_event()
            case AbortHandover():
                self._addressed(request.worker_id, request.rank)
                verdict = await self._abort(request)
            case DescribeHandover():
                self._addressed(request.worker_id, request.rank)
                self.protocol.status_requested(request.token)
                return self.protocol.describe(self._now())
            case DescribeMemory():
                self._addressed(request.worker_id, request.rank)
                return self._memory_described()
            case _:
                raise TypeError(f"expected a command about handovers, got {type(request).__name__}")
        return self.protocol.describe(self._now(), verdict)

    def _memory_described(self) -> MemoryDescribed:
        return memory_described(
            self._context,
            self._memory,
            self.protocol.cell_table,
            self.protocol.placement,
            self._staging.transfers,
        )

    def _addressed(self, worker_id: int, rank: int) -> None:
        if (worker_id, rank) != (self._worker_id, self._rank):
            raise ValueError(
                f"this is rank {self._rank} of worker {self._worker_id}, not rank {rank} of worker"
                f" {worker_id}"
            )

    async def _propose(self, command: ProposeHandover) -> CommandVerdict:
        placement: Placement | str = ""
        if (
            self.protocol.verdict_on_proposal(command) is CommandVerdict.TAKE
        ):  # Validating a large table takes milliseconds.
            placement = await self._off_loop(_read_placement, command)
        if isinstance(placement, Placement) and turned(self.protocol.placement, placement):
            # Parts that the rank copies from its own cells are compared with its own checksums, which it may
            # still compute if it has just started. Its leases wait for them, too.
            await self._sealed.wait()
        verdict = self.protocol.propose(command, placement, self._now())
        if verdict is CommandVerdict.TAKE:
            self._copies.traceparent = command.traceparent
            log.info(
                "rank %d stages handover %d to epoch %d (plan %s)",
                self._rank,
                command.handover,
                command.placement.epoch,
                command.plan,
            )
        self._on_event()
        return verdict

    async def _abort(self, command: AbortHandover) -> CommandVerdict:
        verdict = self.protocol.abort(command, self._now())
        if verdict is CommandVerdict.TAKE:
            log.info("rank %d aborts handover %d: %s", self._rank, command.handover, command.reason)
        self._on_event()
        if verdict is CommandVerdict.TAKE and self._copies.reads:
            await asyncio.wait(self._copies.reads, timeout=STOP_SECONDS)
        return verdict

    # requests of other ranks

    async def _answer_reader(self, request: Message) -> Message:
        if isinstance(request, EndLease):
            self._addressed(request.worker_id, request.rank)
            self.protocol.cell_table.end(request.lease, self._now())
            self._on_event()
            return LeaseEnded(worker_id=self._worker_id, rank=self._rank, lease=request.lease)
        if not isinstance(request, LeaseExperts):
            raise TypeError(f"expected LeaseExperts or EndLease, got {type(request).__name__}")
        self._addressed(request.worker_id, request.rank)
        await self._sealed.wait()
        return self._lease_out(request)

    def _lease_out(self, request: LeaseExperts) -> ExpertsLeased:
        if not 0 <= request.reader < self._context.about.ranks or request.reader == self._rank:
            raise ValueError(
                f"rank {request.reader} asks to read rank {self._rank}; this engine has ranks 0 to"
                f" {self._context.about.ranks - 1}"
            )
        if not request.seconds > 0:
            raise ValueError(f"a lease for {request.seconds} s: use more than 0")
        first = self._rank * self._slots
        experts = [
            Requested(layer, slot - first, expert, part) for layer, slot, expert, part in request.experts
        ]
        seconds = min(request.seconds, self._staging.config.lease_seconds)
        lease = self.protocol.cell_table.lease(
            request.reader, request.handover, experts, seconds, self._now()
        )
        self._notify_backends()
        self._on_event()
        return ExpertsLeased(
            worker_id=self._worker_id,
            rank=self._rank,
            lease=lease.number,
            memory=self._address(),
            cells=lease.cells,
            checksums=lease.checksums,
        )

    def _address(self) -> MemoryAddress:
        address = self._own
        for transfer in self._staging.transfers:
            address = transfer.address(address)
        return address

    def _notify_backends(self) -> None:
        """Tell the transfer backends whether readers may need their help."""
        active = self.protocol.cell_table.leases > 0
        if active != self._busy:
            self._busy = active
            for transfer in self._staging.transfers:
                transfer.busy(active)

    # execution of effects

    def _on_event(self) -> None:
        self._carry_out()
        self._changed.set()

    def _report(self, report: Report) -> None:
        self.protocol.take(report, self._now())
        self._on_event()

    def _carry_out(self) -> None:
        if self._tasks is None:
            return
        for effect in self.protocol.drain():
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Prepare():
                self._preparing = self._spawn(
                    self._prepare(effect), f"rank {self._rank} prepares handover {effect.handover}"
                )
            case Adopt():
                self._spawn(self._adopt(effect), f"rank {self._rank} adopts handover {effect.handover}")
            case Forget():
                if self._adoption is not None:
                    self._experts.forget(self._adoption)
                self._adoption = None
                self._copies.give_up()
                if self._preparing is not None:
                    self._preparing.cancel()
            case _:
                self._copies.carry_out(effect)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None] | None":
        if self._tasks is None:
            work.close()
            return None
        return self._tasks.create_task(work, name=name)

    async def _prepare(self, effect: Prepare) -> None:
        began = time.time_ns()
        try:
            adoption = await self._experts.prepare(effect.placement, effect.cells)
        # Engines may raise any exception here; the epoch before continues to be served.
        except Exception as error:
            log.warning("rank %d cannot prepare handover %d", self._rank, effect.handover, exc_info=True)
            self._staging.trace(self._copies.traceparent, "prepare", began, {}, str(error))
            self.protocol.unprepared(
                effect.handover,
                f"the engine of rank {self._rank} could not prepare: {error or type(error).__name__}",
                self._now(),
            )
        else:
            self._staging.trace(
                self._copies.traceparent, "prepare", began, {"roost.epoch": effect.placement.epoch}
            )
            if self.protocol.prepared(effect.handover):
                self._adoption = adoption
            else:
                self._experts.forget(adoption)
        self._on_event()

    async def _adopt(self, effect: Adopt) -> None:
        assert self._adoption is not None
        try:
            await self._experts.adopt(self._adoption)
        except EngineFailed as error:
            log.warning("rank %d ends before handover %d is adopted: %s", self._rank, effect.handover, error)
            return
        self._adoption = None
        self.protocol.adopted(self._now())
        log.info(
            "rank %d serves epoch %d (handover %d)",
            self._rank,
            self.protocol.protocol_state.served,
            effect.handover,
        )
        self._on_event()

    # helpers

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _off_loop(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run on the executor, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


def _read_placement(command: ProposeHandover) -> Placement | str:
    """Decode the placement of a proposal. Return the error text when it is invalid."""
    try:
        return Placement.from_record(command.placement)
    except ValueError as error:
        return str(error)


def _lower_priority(niceness: int) -> None:
    """Lower the priority of this thread, so that the computing threads go first."""
    if niceness:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
