"""One expert rank: what it counts, votes, checks and tells the agent.

`hooks` calls it from vLLM's stepping thread, the link from a thread of its own. A lock is held over each
change of the handover state, and over a vote from the ballot to the end of what it decided."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from roost_vllm.ballots import VOTE_STEPS, Ballot, ballot_digest, is_due, tally
from roost_vllm.counters import Counters, Counts
from roost_vllm.identity import Identity
from roost_vllm.link import Link
from roost_vllm.mailbox import Mailbox
from roost_vllm.maps import Table, arrivals, demand_by_expert
from roost_vllm.settings import Settings
from roost_vllm.slot_digests import SlotDigests
from roost_vllm.taps import RequestTap
from roost_vllm.wire import (
    AgentWelcome,
    DescribeWorker,
    DropMap,
    FromAgent,
    FromWorker,
    LinkError,
    MapMoved,
    PermitVote,
    StageMap,
    WorkerDemand,
    WorkerHello,
)

logger = logging.getLogger("vllm.roost")

_REPORT_SECONDS = 1.0
_LEAST_REPORT_SECONDS = 0.05
Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Gathers the numbers of every rank, in the order of ranks. A collective: all ranks must call it together."""


class Rearranging(Protocol):
    """Access to vLLM's own EPLB, as far as a rank needs it."""

    def read_map(self) -> Table:
        """Return the map in force."""
        ...

    def load(self) -> torch.Tensor:
        """Return the load of the step that was computed last, [layers, slots of all ranks]."""
        ...

    def rearrange(self) -> None:
        """Call vLLM's own rearrangement. A collective."""
        ...

    def is_moving(self) -> bool:
        """Return whether an asynchronous rearrangement has layers left."""
        ...


class ExpertRank:
    """One expert rank. refusal: why it takes no maps (empty: it takes them). Then vLLM's own policy stays in
    force, and what it does is reported."""

    def __init__(
        self,
        identity: Identity,
        engine: Rearranging,
        exchange: Exchange,
        digests: SlotDigests,
        device: torch.device,
        settings: Settings,
        refusal: str = "",
    ) -> None:
        self.identity = identity
        self.tap = RequestTap(identity.layers)
        self._engine = engine
        self._exchange = exchange
        self._digests = digests
        self._settings = settings
        self._counters = Counters(
            identity.layers,
            identity.slots * identity.ranks,
            identity.ranks,
            device,
            sees_all=identity.sees_all,
        )
        self._mailbox = Mailbox(engine.read_map(), identity.experts, refusal)
        self._refuse_after_mismatch()
        self._is_voting = not refusal
        """fixed at the start, where all ranks find the same: one that does not vote would hang the others"""
        self._lock = threading.Lock()
        self._step: tuple[Any, Any] | None = None
        """runner and scheduler's choice of the step that is computed"""
        self._count = 0
        self._every = self._wished_every = VOTE_STEPS
        self._fallback = bool(refusal)
        self._has_rearranged = False
        """vLLM's own policy rearranges, or has done so, and that is not reported yet"""
        self._agreed: torch.Tensor | None = None
        self._move_started = 0.0
        self._report_seconds = _REPORT_SECONDS
        self._reported = time.monotonic()
        self._reports = self._checks = True
        self._votes, self._vote_seconds = 0, 0.0
        self._step_seconds, self._told_seconds = 0.0, 0.0
        self.link = Link(settings, self)
        if refusal:
            self._tell_refusal(refusal)

    # vLLM's stepping thread

    def schedule(self, runner: Any, scheduled: Any) -> None:
        """Note what vLLM's scheduler chose for the next step."""
        self.reporting(self._schedule, runner, scheduled)

    def begin_step(self) -> None:
        """Note that a forward pass of real tokens begins."""
        self.reporting(self._begin_step)

    def end_step(self, *, is_dummy: bool) -> None:
        """Count a step's load, before vLLM's own bookkeeping."""
        self.reporting(self._end_step, is_dummy)

    def copied(self, layers: Sequence[int], pending: Any) -> None:
        """Take the experts of a step that vLLM copied to the host; see `RequestTap.copied`."""
        self.reporting(self.tap.copied, layers, pending)

    def reporting(self, work: Callable[..., None], *given: Any) -> None:
        """Do work that only reports. It reads fields of vLLM that another release may lack: a failure ends
        the reports, and not vLLM."""
        if not self._reports:
            return
        try:
            work(*given)
        except Exception as error:
            self._reports = False
            logger.exception("roost: reports of this worker end")
            reason = f"reports of this worker end: {type(error).__name__}: {error}"
            self.link.send(LinkError(reason=reason))

    def _schedule(self, runner: Any, scheduled: Any) -> None:
        self._step = (runner, scheduled)
        for report in self.tap.begin(scheduled):
            if self.identity.tells_demand:
                self.link.send(report)
        if not scheduled.num_scheduled_tokens:  # the last requests ended: no step follows soon
            self._report(True)

    def _begin_step(self) -> None:
        self._counters.begin_step()
        if self._step is not None and self.identity.tells_demand:
            self.tap.forward(*self._step)

    def _end_step(self, is_dummy: bool) -> None:
        if not is_dummy and self.tap.is_counted:
            self._counters.add(self._engine.load())
        self.tap.end_forward()
        self._step = None

    def after_step(self) -> None:
        """Count the step, vote if all ranks do, check some digests, and report."""
        self._count += 1
        if self._mailbox.has_passed:
            self._follow_move()
        if self._has_rearranged and not self._engine.is_moving():
            self._has_rearranged = False
            self._follow_vllm()
        if self._is_voting and is_due(self._count, self._every):
            self._vote()
        if not self._engine.is_moving():
            self._check_digests()
        self.reporting(self._report, time.monotonic() - self._reported >= self._report_seconds)

    def refuse(self, reason: str) -> None:
        """Take no maps, do not vote, and leave vLLM's own policy in force. Every rank must be told so before
        the first step."""
        self._is_voting = False
        self._fallback = True
        with self._lock:
            self._mailbox.refusal = reason
        self._tell_refusal(reason)
        self.link.introduce_again()

    def _tell_refusal(self, reason: str) -> None:
        logger.warning("roost: no placements: %s. vLLM's own policy stays in force", reason)

    def is_fallback(self) -> bool:
        """Return whether vLLM's own policy is in force: by agreement, or because no maps are taken here."""
        return self._fallback

    def take_agreed(self) -> torch.Tensor | None:
        """Return the map that all ranks agreed on, int64 [layers, slots], once."""
        agreed, self._agreed = self._agreed, None
        return agreed

    def vllm_rearranged(self) -> None:
        """Note a call of vLLM's rearrangement. It may go on: under asynchronous EPLB layers follow."""
        self._has_rearranged = self._fallback

    def _follow_vllm(self) -> None:
        """Report the map that vLLM's own policy has chosen."""
        table, old = self._engine.read_map(), self._mailbox.table
        if np.array_equal(table, old):
            return
        with self._lock:
            self.reporting(self._flush)
            self._mailbox.replaced_by_vllm(table)
            self._tell_moved(old, 0, 0.0)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the processor time of the context as the plugin's. Not for capture hooks: two readings of the
        clock take longer than one of them."""
        started = time.thread_time()
        yield
        self._step_seconds += time.thread_time() - started

    # The vote

    def _vote(self) -> None:
        with self._lock:
            started = time.perf_counter()
            rows = self._exchange(self._ballot())
            self._votes += 1
            self._vote_seconds += time.perf_counter() - started
            outcome = tally([Ballot(*row) for row in rows], every=self._every, fallback=self._fallback)
            if outcome.count != self._count:
                logger.warning("roost: counts of steps differ: %s", [row[0] for row in rows])
            self._count, self._every = outcome.count, outcome.every
            if outcome.fallback != self._fallback:
                self._change_policy(fallback=outcome.fallback)
            elif outcome.passed:
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

    def _change_policy(self, *, fallback: bool) -> None:
        self._fallback = fallback
        logger.warning("roost: the policy of %s is in force", "vLLM" if fallback else "the agent")
        if fallback:
            self._mailbox.let_go("no agent for too long: vLLM's own policy took over")

    def _carry_out(self) -> None:
        """Call vLLM's rearrangement with the map that all ranks have just voted for."""
        self.reporting(self._flush)
        held = self._mailbox.pass_vote()
        self._agreed = torch.from_numpy(held.table.astype(np.int64))
        self._move_started = time.perf_counter()
        self._engine.rearrange()
        if not self._engine.is_moving():
            self._finish_move(held.handover)

    def _follow_move(self) -> None:
        """Note the layers that an asynchronous rearrangement has committed."""
        with self._lock:
            held, done = self._mailbox.held, self._mailbox.layers_done
            assert held is not None
            table = self._engine.read_map()
            self._mailbox.layers_done = int((table == held.table).all(axis=1).sum())
            if not self._engine.is_moving():
                self._finish_move(held.handover)
            elif self._mailbox.layers_done != done:
                self.link.send(self._mailbox.status())

    def _finish_move(self, handover: int) -> None:
        seconds = time.perf_counter() - self._move_started
        old, served = self._mailbox.table, self._mailbox.served
        self._mailbox.come_into_force(self._engine.read_map())
        if self._mailbox.served != served:
            self._tell_moved(old, handover, seconds)
        else:
            self.link.send(self._mailbox.status())

    def _tell_moved(self, old: Table, handover: int, seconds: float) -> None:
        table, identity = self._mailbox.table, self.identity
        received = arrivals(old, table, rank=identity.rank, slots=identity.slots)
        packed = table.astype("<i2").tobytes()
        self.link.send(MapMoved(handover=handover, map=packed, received=received, seconds=seconds))
        self.link.send(self._mailbox.status())
        self._digests.recheck(old, table)

    # Digests

    def _check_digests(self) -> None:
        """Check some digests. When that fails, this rank takes no maps any more: no one would know whether
        they are right."""
        if not self._checks:
            return
        try:
            self._compare_digests()
        except Exception as error:
            self._checks = False
            logger.exception("roost: digests of this worker end")
            reason = f"digests cannot be computed: {type(error).__name__}: {error}"
            with self._lock:
                self._mailbox.refusal = self._mailbox.refusal or reason
            self.link.send(LinkError(reason=reason))

    def _compare_digests(self) -> None:
        found = self._digests.advance(self._mailbox.table)
        if found is None:
            return
        for mismatch in found:
            self.link.send(mismatch)
        with self._lock:
            self._refuse_after_mismatch()
        self.link.send(self._digests.told(self._mailbox.served))

    def _refuse_after_mismatch(self) -> None:
        if self._mailbox.refusal or not self._digests.mismatches:
            return
        first = self._digests.mismatches[0]
        slot = f"slot {first.slot} of layer {first.layer}"
        self._mailbox.refusal = f"{slot} does not hold expert {first.expert}"
        logger.error("roost: %s", self._mailbox.refusal)

    # Reports

    def _flush(self) -> None:
        """Report what was counted under the map in force, before it changes. Waits for the device."""
        self._tell_demand(self._counters.land(wait=True))
        self._counters.launch()
        self._tell_demand(self._counters.land(wait=True))

    def _report(self, is_due: bool) -> None:
        """Report what was counted. Never waits for the device: what it is still copying is told later."""
        self._tell_demand(self._counters.land())
        if is_due:
            self._reported = time.monotonic()
            self._counters.launch()
            self._tell_demand(self._counters.land())

    def _tell_demand(self, counts: Counts | None) -> None:
        if counts is None or not self._reports:
            return
        table, identity = self._mailbox.table, self.identity
        demand = demand_by_expert(counts.slots, table, identity.experts)
        spent = self._step_seconds + self.link.processor_seconds
        message = WorkerDemand(
            served=self._mailbox.served,
            steps=counts.steps,
            seconds=counts.seconds,
            tokens=int(counts.slots.sum()) // (identity.layers * identity.top_k),
            demand=demand.astype("<i8").tobytes() if identity.tells_demand else b"",
            slots=counts.slots.astype("<i8").tobytes(),
            balance=counts.balance.astype("<f8").tobytes(),
            votes=self._votes,
            vote_seconds=self._vote_seconds,
            plugin_seconds=spent - self._told_seconds,
        )
        self._votes, self._vote_seconds, self._told_seconds = 0, 0.0, spent
        self.link.send(message)

    # The link's thread

    def hello(self, *, proof: bytes, nonce: bytes) -> WorkerHello:
        """Return the introduction, with the state of the handover."""
        with self._lock:
            return self.identity.hello(self._mailbox, proof=proof, nonce=nonce)

    def welcomed(self, welcome: AgentWelcome) -> None:
        """Take the agent's wishes, and send the state, the digests and the slots that are wrong."""
        with self._lock:
            self._wished_every = max(1, welcome.vote_steps)
            self._report_seconds = max(_LEAST_REPORT_SECONDS, welcome.report_seconds)
            if not self._mailbox.epoch:
                self._mailbox.epoch = welcome.epoch
            told = self._digests.told(self._mailbox.served)
            for message in (self._mailbox.status(), told, *self._digests.mismatches):
                self.link.send(message)

    def receive(self, message: FromAgent) -> None:
        """Take a message of the agent, and send the answer."""
        with self._lock:
            self.link.send(self._answer(message))

    def _answer(self, message: FromAgent) -> FromWorker:
        match message:
            case StageMap():
                return self._mailbox.stage(message)
            case PermitVote():
                return self._mailbox.permit(message)
            case DropMap():
                return self._mailbox.drop(message)
            case DescribeWorker():
                return self._mailbox.status()
        return LinkError(reason=f"{type(message).__name__} belongs to the start of a connection")
