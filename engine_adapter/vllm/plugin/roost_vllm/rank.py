"""One expert rank: what it counts, votes, checks and tells the agent. `hooks` calls it from vLLM's stepping
thread, the link from its own; a lock is held over each change of the handover state, and over a whole
vote."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roost_vllm import __version__
from roost_vllm.ballots import VOTE_STEPS, Ballot, ballot_digest, is_due, tally
from roost_vllm.counters import Counters, Counts
from roost_vllm.digests import ExpertHasher, SlotCheck, digest_text
from roost_vllm.link import Link
from roost_vllm.mailbox import Mailbox
from roost_vllm.maps import Table, arrivals, demand_by_expert
from roost_vllm.settings import Settings
from roost_vllm.taps import RequestTap
from roost_vllm.wire import (
    PROTOCOL,
    AgentWelcome,
    DescribeWorker,
    DropMap,
    ExpertDigests,
    FromAgent,
    FromWorker,
    LinkError,
    MapMoved,
    PermitVote,
    SlotMismatch,
    StageMap,
    WorkerDemand,
    WorkerHello,
)

logger = logging.getLogger("vllm.roost")

_CHECK_SECONDS = 0.0015
"""Time for digests after one step."""
_REPORT_SECONDS = 1.0
Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Gathers the numbers of every rank, in the order of ranks. A collective: all ranks must call it together."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Facts of this worker that never change; see `wire.WorkerHello`."""

    missing: tuple[str, ...]
    engine: str
    instance: str
    rank: int
    ranks: int
    target: int
    targets: int
    model: str
    layers: int
    experts: int
    slots: int
    top_k: int
    expert_bytes: int
    all2all: str
    dtype: str
    quantisation: str
    asynchronous: bool
    sees_all: bool
    """this rank counts the tokens of all ranks"""
    tells_demand: bool
    """no lower rank of its target counts the same tokens"""


class Engine:
    """Access to vLLM's own state, as far as a rank needs it."""

    def read_map(self) -> Table:
        """Return the map in force."""
        raise NotImplementedError

    def load(self) -> torch.Tensor:
        """Return the load of the step that has just been computed, [layers, slots of all ranks]."""
        raise NotImplementedError

    def rearrange(self) -> None:
        """Call vLLM's own rearrangement."""
        raise NotImplementedError

    def is_moving(self) -> bool:
        """Return whether an asynchronous rearrangement has layers left."""
        raise NotImplementedError

    @property
    def weights(self) -> Sequence[Sequence[torch.Tensor]]:
        """[layers][tensors], each [slots of this rank, ...]"""
        raise NotImplementedError


class ExpertRank:
    """One expert rank. digests: of all slots of all ranks at the start, int64 [layers, slots of all
    ranks]."""

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        exchange: Exchange,
        hasher: ExpertHasher,
        device: torch.device,
        digests: np.ndarray,
        settings: Settings,
        refusal: str = "",
    ) -> None:
        self.identity = identity
        self.tap = RequestTap(identity.layers, identity.top_k)
        self._counters = Counters(
            identity.layers,
            identity.slots * identity.ranks,
            identity.ranks,
            device,
            sees_all=identity.sees_all,
        )
        self._engine = engine
        self._exchange = exchange
        self._hasher = hasher
        self._device = device
        self._lock = threading.Lock()
        self._fallback = False
        self._count = 0
        self._every = VOTE_STEPS
        self._wished_every = VOTE_STEPS
        self._report_seconds = _REPORT_SECONDS
        self._reported = time.monotonic()
        self._votes, self._vote_seconds, self._step_seconds = 0, 0.0, 0.0
        self._told_processor_seconds = 0.0
        self._agreed: torch.Tensor | None = None
        self._step: tuple[Any, Any] | None = None
        """runner and scheduler's choice of the step that is computed"""
        self._move_started = 0.0
        self._check: SlotCheck | None = None
        table = engine.read_map()
        self._known, self._mismatches = first_digests(table, digests, identity.experts)
        if self._mismatches and not refusal:
            first = self._mismatches[0]
            refusal = f"copies of expert {first.expert} of layer {first.layer} differ since the start"
        self._mailbox = Mailbox(table, identity.experts, refusal)
        own = slice(identity.rank * identity.slots, (identity.rank + 1) * identity.slots)
        self._own = digests[:, own].copy()
        """[layers, slots of this rank]: digests as last computed"""
        self.link = Link(settings, self)
        self._settings = settings

    # vLLM's stepping thread

    def schedule(self, runner: Any, scheduled: Any) -> None:
        """Note what vLLM's scheduler chose for the next step."""
        self._step = (runner, scheduled)
        for report in self.tap.begin(scheduled):
            if self.identity.tells_demand:
                self.link.send(report)
        if not scheduled.num_scheduled_tokens:
            self.report(is_idle=True)

    def begin_step(self) -> None:
        """Note that a forward pass of real tokens begins."""
        self._counters.begin_step()
        if self._step is not None and self.identity.tells_demand:
            self.tap.forward(*self._step)

    def end_step(self, *, is_dummy: bool) -> None:
        """Count a step's load, before vLLM's own bookkeeping."""
        if not is_dummy and self.tap.is_counted:
            self._counters.add(self._engine.load())
        self.tap.end_forward()
        self._step = None

    def after_step(self) -> None:
        """Count the step, vote if all ranks do, and check some digests."""
        self._count += 1
        if self._mailbox.has_passed:
            self._follow_move()
        if is_due(self._count, self._every):
            self._vote()
        if self._check is not None:
            self._advance_check()
        self.report()

    def refuse(self, reason: str) -> None:
        """Take no maps from now on."""
        with self._lock:
            self._mailbox.refusal = reason

    def is_fallback(self) -> bool:
        """Return whether vLLM's own policy is in force, by agreement."""
        return self._fallback

    def take_agreed(self) -> torch.Tensor | None:
        """Return the map that all ranks agreed on, int64 [layers, slots], once."""
        agreed, self._agreed = self._agreed, None
        return agreed

    def vllm_rearranged(self) -> None:
        """Note the end of a rearrangement of vLLM's own."""
        if not self._fallback or self._engine.is_moving():
            return
        table = self._engine.read_map()
        with self._lock:
            if np.array_equal(table, self._mailbox.table):
                return
            self._flush()
            old = self._mailbox.table
            self._mailbox.replaced_by_vllm(table)
            self._tell_moved(old, table, 0, 0.0)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the processor time of the context as the plugin's."""
        started = time.thread_time()
        yield
        self._step_seconds += time.thread_time() - started

    def _vote(self) -> None:
        started = time.perf_counter()
        with self._lock:
            rows = self._exchange(self._ballot())
            outcome = tally([Ballot(*row) for row in rows], every=self._every, fallback=self._fallback)
            self._votes += 1
            self._vote_seconds += time.perf_counter() - started
            if outcome.count != self._count:
                logger.warning("roost: counts of steps differ: %s", [row[0] for row in rows])
            self._count, self._every = outcome.count, outcome.every
            if outcome.fallback != self._fallback:
                self._change_policy(outcome.fallback)
            if outcome.passed:
                self._carry_out()

    def _ballot(self) -> Ballot:
        proposal = None if self._engine.is_moving() else self._mailbox.proposal()
        is_alone = self._settings.fallback and self.link.alone_seconds() > self._settings.patience
        return Ballot(
            count=self._count,
            proposal=ballot_digest(proposal.digest) if proposal else 0,
            served=ballot_digest(self._mailbox.served),
            handover=proposal.handover if proposal else 0,
            every=self._wished_every,
            fallback=int(is_alone),
        )

    def _change_policy(self, fallback: bool) -> None:
        self._fallback = fallback
        logger.warning("roost: the policy of %s is in force", "vLLM" if fallback else "the agent")
        if fallback:
            self._mailbox.let_go("no agent for too long: vLLM's own policy took over")

    def _carry_out(self) -> None:
        """Call vLLM's rearrangement with the map that all ranks have just voted for."""
        self._flush()
        held = self._mailbox.pass_vote()
        old = self._mailbox.table
        self._agreed = torch.from_numpy(held.table.astype(np.int64))
        self._move_started = time.perf_counter()
        self._engine.rearrange()
        if not self._engine.is_moving():
            self._finish_move(old, held.handover)

    def _follow_move(self) -> None:
        """Note the layers that an asynchronous rearrangement has committed."""
        with self._lock:
            mailbox = self._mailbox
            held, done = mailbox.held, mailbox.layers_done
            assert held is not None
            mailbox.layers_done = int((self._engine.read_map() == held.table).all(axis=1).sum())
            if not self._engine.is_moving():
                self._finish_move(mailbox.table, held.handover)
            elif mailbox.layers_done != done:
                self.link.send(mailbox.status())

    def _finish_move(self, old: Table, handover: int) -> None:
        table = self._engine.read_map()
        self._mailbox.come_into_force(table)
        if self._mailbox.flipped == handover:
            self._tell_moved(old, table, handover, time.perf_counter() - self._move_started)
        self.link.send(self._mailbox.status())

    def _tell_moved(self, old: Table, table: Table, handover: int, seconds: float) -> None:
        rank, slots = self.identity.rank, self.identity.slots
        received = arrivals(old, table, rank=rank, slots=slots)
        self.link.send(MapMoved(handover=handover, map=_packed(table), received=received, seconds=seconds))
        if handover == 0:
            self.link.send(self._mailbox.status())
        own = slice(rank * slots, (rank + 1) * slots)
        changed = [(int(layer), int(slot)) for layer, slot in np.argwhere(old[:, own] != table[:, own])]
        pending = self._check.slots if self._check is not None else []
        self._start_check(sorted({*changed, *pending}))

    # Digests

    def _start_check(self, slots: Sequence[tuple[int, int]]) -> None:
        self._check = SlotCheck(self._hasher, self._engine.weights, slots, self._device)

    def _advance_check(self) -> None:
        check = self._check
        assert check is not None
        if self._engine.is_moving():
            return
        check.advance(_CHECK_SECONDS)
        if check.is_done:
            self._check = None
            self._compare(check)

    def _compare(self, check: SlotCheck) -> None:
        """Compare digests with those of the experts that the map names, and tell the agent."""
        first = self.identity.rank * self.identity.slots
        for (layer, slot), value in zip(check.slots, check.found(), strict=True):
            found = digest_text(value)
            self._own[layer, slot] = value
            expert = int(self._mailbox.table[layer, first + slot])
            expected = self._known[layer][expert]
            if found != expected:
                self._tell_mismatch(layer, first + slot, expert, expected, found)
        self.link.send(self._digests())

    def _tell_mismatch(self, layer: int, slot: int, expert: int, expected: str, found: str) -> None:
        mismatch = SlotMismatch(layer=layer, slot=slot, expert=expert, expected=expected, found=found)
        logger.error("roost: slot %d of layer %d does not hold expert %d", slot, layer, expert)
        with self._lock:
            self._mismatches.append(mismatch)
            self._mailbox.refusal = f"slot {slot} of layer {layer} does not hold expert {expert}"
        self.link.send(mismatch)

    def _digests(self) -> ExpertDigests:
        rows = tuple(tuple(digest_text(int(value)) for value in row) for row in self._own)
        return ExpertDigests(served=self._mailbox.served, digests=rows)

    # Reports

    def _flush(self) -> None:
        """Report what was counted under the map in force, before it changes. Waits for the device."""
        for is_new in (False, True):
            if is_new:
                self._counters.launch()
            counts = self._counters.land(wait=True)
            if counts is not None:
                self.link.send(self._demand(counts))

    def report(self, *, is_idle: bool = False) -> None:
        """Report what was counted, when it is due or no step follows soon. Never waits for the device."""
        counts = self._counters.land()
        if counts is not None:
            self.link.send(self._demand(counts))
        if is_idle or time.monotonic() - self._reported >= self._report_seconds:
            self._reported = time.monotonic()
            self._counters.launch()

    def _demand(self, counts: Counts) -> WorkerDemand:
        mailbox, identity = self._mailbox, self.identity
        demand = demand_by_expert(counts.slots, mailbox.table, identity.experts)
        spent = self._step_seconds + self.link.processor_seconds
        told, self._told_processor_seconds = self._told_processor_seconds, spent
        votes, vote_seconds, self._votes, self._vote_seconds = self._votes, self._vote_seconds, 0, 0.0
        return WorkerDemand(
            served=mailbox.served,
            steps=counts.steps,
            seconds=counts.seconds,
            tokens=int(counts.slots.sum()) // (identity.layers * identity.top_k),
            demand=demand.astype("<i8").tobytes() if identity.tells_demand else b"",
            slots=counts.slots.astype("<i8").tobytes(),
            balance=counts.balance.astype("<f8").tobytes(),
            votes=votes,
            vote_seconds=vote_seconds,
            plugin_seconds=spent - told,
        )

    # The link's thread

    def hello(self, *, proof: bytes, nonce: bytes) -> WorkerHello:
        """Return the introduction, with the state of the handover."""
        identity = self.identity
        with self._lock:
            status, table = self._mailbox.status(), self._mailbox.table
        return WorkerHello(
            protocol=PROTOCOL,
            proof=proof,
            nonce=nonce,
            plugin=__version__,
            engine=identity.engine,
            missing=identity.missing,
            refuses=self._mailbox.refusal,
            instance=identity.instance,
            pid=os.getpid(),
            rank=identity.rank,
            ranks=identity.ranks,
            target=identity.target,
            targets=identity.targets,
            model=identity.model,
            layers=identity.layers,
            experts=identity.experts,
            slots=identity.slots,
            top_k=identity.top_k,
            expert_bytes=identity.expert_bytes,
            all2all=identity.all2all,
            dtype=identity.dtype,
            quantisation=identity.quantisation,
            asynchronous=identity.asynchronous,
            map=_packed(table),
            state=status.state,
            handover=status.handover,
            flipped=status.flipped,
            epoch=status.epoch,
        )

    def welcomed(self, welcome: AgentWelcome) -> Sequence[FromWorker]:
        """Take the agent's wishes, and return the state, the digests and what is wrong with them."""
        with self._lock:
            self._wished_every = max(1, welcome.vote_steps)
            self._report_seconds = max(0.05, welcome.report_seconds)
            if not self._mailbox.epoch:
                self._mailbox.epoch = welcome.epoch
            mismatches = list(self._mismatches)
        return [self._mailbox.status(), self._digests(), *mismatches]

    def receive(self, message: FromAgent) -> FromWorker | None:
        """Return the answer to a message of the agent."""
        with self._lock:
            if isinstance(message, StageMap):
                return self._mailbox.stage(message)
            if isinstance(message, PermitVote):
                return self._mailbox.permit(message)
            if isinstance(message, DropMap):
                return self._mailbox.drop(message)
            if isinstance(message, DescribeWorker):
                return self._mailbox.status()
        return LinkError(reason=f"{type(message).__name__} belongs to the start of a connection")


def _packed(table: Table) -> bytes:
    return table.astype("<i2").tobytes()


def first_digests(
    table: Table, digests: np.ndarray, experts: int
) -> tuple[list[list[str]], list[SlotMismatch]]:
    """Return the digest of each expert [layers][experts] as its first copy has it, and the copies that
    differ.

    table: map at the start. digests: int64 [layers, slots of all ranks]."""
    known = [[""] * experts for _ in table]
    mismatches = []
    for layer, slot in np.ndindex(table.shape):
        expert, found = int(table[layer, slot]), digest_text(int(digests[layer, slot]))
        expected = known[layer][expert] = known[layer][expert] or found
        if found != expected:
            mismatches.append(
                SlotMismatch(layer=layer, slot=slot, expert=expert, expected=expected, found=found)
            )
    return known, mismatches
