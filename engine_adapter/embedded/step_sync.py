"""How the ranks of one engine keep step: their process group, the header each step begins with, and sleeping while nobody has work.

**Step.** All ranks run the same numbered steps. A step begins with one all_gather of the ranks' headers (`StepSync.exchange`).

**Sleep.** When the headers of a step show that no rank has work, all ranks sleep before the next step n, outside any collective
(gloo raises or blocks for minutes there). A rank that gets work sends `wake(n)` to all the others and goes on; a sleeping rank takes
only the wake of its own n, so that a late one of an earlier sleep does nothing. Each rank sends at most one wake per n, and empties its
socket whenever a sleep ends (what is in it then is of this sleep or an earlier one), so the socket's queue cannot fill up: a rank that waits
for the others in step n has at most one wake of each in it. Nothing polls, except for a look every second whether the peers still live.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

STEP_TIMEOUT_SECONDS = 10.0
"""How long a rank waits for another inside a step before it gives the engine up."""
JOIN_TIMEOUT_SECONDS = 120.0
"""How long the ranks wait for each other at start."""
HEADER_FIELDS = 8
_PEER_CHECK_SECONDS = 1.0
_WAKE_BYTES = 8
_LONGEST_SOCKET_PATH = 107

_T = TypeVar("_T")


class StepSyncError(Exception):
    """The ranks cannot go on together; the engine fails as a unit."""


class PeerLost(StepSyncError):
    """Another rank died or closed its connections."""


class PeerTimeout(StepSyncError):
    """Another rank did not answer within the step time-out: frozen, or much too slow."""


class StepMismatch(StepSyncError):
    """The ranks are not at the same step, or do not serve the same epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """What a rank tells the others at the beginning of a step; on the wire int64[8] in this order, the last one spare."""

    step: int
    tokens: int = 0
    """tokens this rank computes in the step; all zero: everybody goes to sleep"""
    flags: int = 0
    """for the step threads to agree on things; any flag of any rank keeps everybody awake"""
    epoch_served: int = 0
    epoch_ready: int = 0
    """highest epoch this rank could serve; all go over to it before they compute, as soon as the least of all ranks exceeds what is served"""
    boundary: int = 0
    """h of the layout: layers below it hold sharded experts"""
    membership: int = 0

    def fields(self) -> list[int]:
        """The wire form."""
        return [self.step, self.tokens, self.flags, self.epoch_served, self.epoch_ready, self.boundary, self.membership, 0]

    @classmethod
    def from_fields(cls, fields: Sequence[int]) -> "StepHeader":
        step, tokens, flags, served, ready, boundary, membership, _ = fields
        return cls(step=step, tokens=tokens, flags=flags, epoch_served=served, epoch_ready=ready, boundary=boundary, membership=membership)


class RankGroup:
    """The ranks of one engine, joined over gloo on 127.0.0.1. Used by one thread; every call is made by all ranks, in the same order.

    Every method raises PeerLost or PeerTimeout when another rank is gone or silent for the step time-out; the group is of no use then.
    """

    def __init__(
        self, run_directory: Path, rank: int, ranks: int, *, step_timeout_s: float = STEP_TIMEOUT_SECONDS, join_timeout_s: float = JOIN_TIMEOUT_SECONDS
    ) -> None:
        """Meet the other ranks at `run_directory`, which belongs to this one incarnation of the engine. Returns when all are there."""
        self.rank = rank
        self.ranks = ranks
        self.collectives = 0
        """made so far: what a step costs is to be counted, not believed"""
        self.seconds = 0.0
        """spent in them so far, waiting for slower ranks included"""
        self._step_timeout_s = step_timeout_s
        self._group: Any = _translated(lambda: _meet(run_directory, rank, ranks, step_timeout_s, join_timeout_s), f"join of {ranks} ranks", join_timeout_s)

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks, *mine.shape]: everybody's tensor of the same shape and dtype, in rank order."""
        # an all-to-all of copies: one round, where gloo's all_gather goes around a ring
        copies = mine.reshape(-1).repeat(self.ranks)
        found = torch.empty_like(copies)
        self._run(lambda: self._group.alltoall_base(found, copies, [], []).wait(), "all_gather")
        return found.view(self.ranks, *mine.shape)

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """rows [sum(send), H], those for rank 0 first: [sum(receive), H], those from rank 0 first."""
        outgoing = bytes_of(rows)
        found = torch.empty((sum(receive), outgoing.shape[1]), dtype=torch.uint8)
        self._run(lambda: self._group.alltoall_base(found, outgoing, list(receive), list(send)).wait(), "all_to_all")
        return found.view(rows.dtype)

    def close(self) -> None:
        """Leave. The others see PeerLost in their next call."""
        self._group.shutdown()

    def _run(self, call: Callable[[], object], what: str) -> None:
        self.collectives += 1
        begun = time.perf_counter()
        _translated(call, what, self._step_timeout_s)
        self.seconds += time.perf_counter() - begun


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes of a row] of rows [n, H]; the same memory when they are contiguous."""
    if not rows.numel():
        return torch.empty((rows.shape[0], rows.shape[1] * rows.element_size()), dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8)


def _meet(run_directory: Path, rank: int, ranks: int, step_timeout_s: float, join_timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # its stubs lack most of what it has
    store = FileStore(str(run_directory / "rendezvous"), ranks)
    # gloo connects under the step time-out, so first wait, longer, until every rank has come
    store.set(f"here/{rank}", "")
    _await_all(store, ranks, join_timeout_s)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=step_timeout_s)
    options._threads = 1
    return gloo(store, rank, ranks, options)


def _await_all(store: FileStore, ranks: int, join_timeout_s: float) -> None:
    """Return when every rank has said that it is here. PeerTimeout names those that have not."""
    try:
        store.wait([f"here/{rank}" for rank in range(ranks)], timedelta(seconds=join_timeout_s))
    except RuntimeError as error:
        missing = [str(rank) for rank in range(ranks) if not store.check([f"here/{rank}"])]
        raise PeerTimeout(
            f"join of {ranks} ranks: rank {', '.join(missing) or '?'} did not come within {join_timeout_s:g} s; see why in its own log"
        ) from error


def _translated(call: Callable[[], _T], what: str, timeout_s: float) -> _T:
    """Run something of torch.distributed; its RuntimeErrors say only in words what happened."""
    try:
        return call()
    except RuntimeError as error:
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise PeerTimeout(f"{what}: a rank was silent for {timeout_s:g} s: {text}") from error
        raise PeerLost(f"{what}: the connection to another rank broke: {text}") from error


class StepSync:
    """One rank's step headers and sleep. `exchange` and `sleep` are the step thread's; `nudge` is for any thread."""

    def __init__(self, run_directory: Path, rank: int = 0, group: RankGroup | None = None) -> None:
        """Bind this rank's control socket in the run directory, which belongs to this one incarnation. `group` None: an engine of one rank.

        LockstepError when the socket cannot be bound there.
        """
        self.rank = rank
        self._group = group
        ranks = 1 if group is None else group.ranks
        self._peers = [_socket_path(run_directory, other) for other in range(ranks) if other != rank]
        self._path = Path(_socket_path(run_directory, rank))
        self._control = _bind(str(self._path))
        self._nudged, self._nudge = socket.socketpair()
        self._nudged.setblocking(False)
        self._nudge.setblocking(False)

    @property
    def collectives(self) -> int:
        """Made by this rank so far; an engine of one rank needs none."""
        return 0 if self._group is None else self._group.collectives

    @property
    def communication_seconds(self) -> float:
        """Time that this rank has spent in collectives so far, waiting for slower ranks included."""
        return 0.0 if self._group is None else self._group.seconds

    def exchange(self, header: StepHeader) -> tuple[StepHeader, ...]:
        """Tell and hear this step's headers, in rank order. PeerLost, PeerTimeout; StepMismatch when the ranks are not at one step
        or serve different epochs."""
        if self._group is None:
            return (header,)
        found = self._group.all_gather(torch.tensor(header.fields(), dtype=torch.int64))
        headers = tuple(StepHeader.from_fields(fields) for fields in found.tolist())
        if any(other.step != header.step for other in headers):
            raise StepMismatch(f"rank {self.rank} is at step {header.step}, the ranks at {[other.step for other in headers]}; the engine must be restarted")
        if any(other.epoch_served != header.epoch_served for other in headers):
            served = [other.epoch_served for other in headers]
            raise StepMismatch(f"rank {self.rank} serves epoch {header.epoch_served}, the ranks {served}; the engine must be restarted")
        return headers

    def sleep(self, step: int) -> None:
        """Wait, without using the processor, until this rank is nudged (then everybody is woken) or another rank wakes it for `step`.

        Called by all ranks before the same step. A nudge that came earlier counts, once. PeerLost when a peer is gone.
        """
        poller = select.poll()
        poller.register(self._nudged, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(1000 * _PEER_CHECK_SECONDS)}
            woken = self._control.fileno() in ready and self._woken_for(step)
            if self._nudged.fileno() in ready:
                _drain(self._nudged)
                self._wake_peers(step)
                return
            if woken:
                return
            if not ready:
                self._check_peers()

    def nudge(self) -> None:
        """This rank has something to do: end its sleep, or its next one at once. Any thread; never blocks."""
        try:
            self._nudge.send(b"n")
        except BlockingIOError:
            return  # as many nudges as the buffer holds are already waiting

    def close(self) -> None:
        """Give the sockets up. Not while `sleep` is running: nudge it first."""
        for one in (self._control, self._nudged, self._nudge):
            one.close()
        self._path.unlink(missing_ok=True)

    def _woken_for(self, step: int) -> bool:
        """Read every wake that is there; whether one is for this sleep and not left over from an earlier one."""
        found = False
        try:
            while True:
                found |= int.from_bytes(self._control.recv(_WAKE_BYTES), "little") == step
        except BlockingIOError:
            return found

    def _wake_peers(self, step: int) -> None:
        with _outgoing() as wake:
            for peer in self._peers:
                _reach(peer, lambda at: wake.sendto(step.to_bytes(_WAKE_BYTES, "little"), at))

    def _check_peers(self) -> None:
        for peer in self._peers:
            with _outgoing() as probe:
                _reach(peer, probe.connect)


def _outgoing() -> socket.socket:
    sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sending.settimeout(_PEER_CHECK_SECONDS)
    return sending


def _reach(peer: str, call: Callable[[str], object]) -> None:
    try:
        call(peer)
    except TimeoutError as error:
        raise PeerTimeout(f"{peer}: the control socket takes nothing; the rank is frozen") from error
    except OSError as error:
        raise PeerLost(f"{peer}: the rank behind this control socket is gone: {error.strerror}") from error


def _drain(readable: socket.socket) -> None:
    try:
        while readable.recv(4096):
            pass
    except BlockingIOError:
        return


def _socket_path(run_directory: Path, rank: int) -> str:
    return str(run_directory / f"rank{rank}.wake")


def _bind(path: str) -> socket.socket:
    if len(path.encode()) > _LONGEST_SOCKET_PATH:
        raise StepSyncError(f"{path}: too long for a unix socket ({_LONGEST_SOCKET_PATH} bytes at most); choose a shorter run directory")
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        control.bind(path)
    except OSError as error:
        control.close()
        raise StepSyncError(f"{path}: cannot bind the control socket: {error.strerror}; every start of an engine needs a run directory of its own") from error
    control.setblocking(False)
    return control
