"""Synchronization of the ranks of one engine: their process group, the header exchange of each step, and
sleep while no rank has work.

**Step.** All ranks run the same numbered steps. A step begins with one all_gather of the ranks' headers
(`StepSync.exchange`). A header says how long its rank's *note* is: what it has to tell the other ranks beside
the header. If any rank has one, a second collective brings all notes to all ranks (`StepSync.share`).

**Sleep.** When the headers of a step show that no rank has work, all ranks sleep before the next step n,
outside any collective (where gloo would raise or block for minutes). A rank that gets work sends `wake(n)` to
all the others and continues. A sleeping rank accepts only the wake of its own n, so a late wake of an earlier
sleep has no effect. Each rank sends at most one wake per n. It empties its socket when a sleep ends, and the
socket then contains only wakes of this sleep or an earlier one. So the socket's queue cannot fill up: a rank
that waits for the others in step n has at most one wake from each in it. Nothing polls, except for a liveness
check of the peers every second.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from fleet.handover import disagreement

STEP_TIMEOUT_SECONDS = 10.0
"""Step timeout: a rank that waits longer for another inside a step gives the engine up."""
JOIN_TIMEOUT_SECONDS = 120.0
"""Join timeout: time that the ranks wait for each other at start."""
_PEER_CHECK_SECONDS = 1.0
_WAKE_BYTES = 8
_SHORTEST_WAIT = 2e-4
_LONGEST_SOCKET_PATH = 107

_T = TypeVar("_T")


class StepSyncError(Exception):
    """The ranks cannot continue together. The engine fails as a unit."""


class PeerLost(StepSyncError):
    """Another rank died or closed its connections."""


class PeerTimeout(StepSyncError):
    """Another rank did not respond within the step timeout: it is frozen or much too slow."""


class StepMismatch(StepSyncError):
    """The ranks are at different steps, or serve different epochs or different placements of one epoch."""


class StepHeader(NamedTuple):
    """Message from a rank to the others at the beginning of a step. On the wire: int64 in this order."""

    step: int
    tokens: int = 0
    """Tokens that this rank computes in the step. When all ranks have 0, all ranks go to sleep."""
    flags: int = 0
    """Flags of the step threads. Any flag of any rank keeps all ranks awake."""
    epoch_served: int = 0
    epoch_ready: int = 0
    """Highest epoch that this rank could serve. All ranks switch before they compute, as soon as the minimum
    over all ranks exceeds the served epoch."""
    digest: int = 0
    """`Placement.digest` of `epoch_ready`, so that ranks whose placements or sharded layers differ end before
    they serve that epoch."""
    note_bytes: int = 0
    """Length of this rank's note."""
    held: int = 0
    """KV pages that this rank's requests hold."""


class RankGroup:
    """Ranks of one engine, joined over gloo on 127.0.0.1. Used by one thread. Every call is made by all
    ranks, in the same order.

    Every method raises PeerLost or PeerTimeout when another rank is gone or silent for the step timeout. The
    group is unusable after that.
    """

    def __init__(
        self,
        run_directory: Path,
        rank: int,
        ranks: int,
        *,
        step_timeout_s: float = STEP_TIMEOUT_SECONDS,
        join_timeout_s: float = JOIN_TIMEOUT_SECONDS,
    ) -> None:
        """Join the other ranks at `run_directory`, which belongs to this incarnation of the engine. Returns
        when all ranks are there."""
        self.rank = rank
        self.ranks = ranks
        self.collectives = 0
        """Number of collectives so far. The cost of a step is measured, not assumed."""
        self.seconds = 0.0
        """Seconds in collectives so far, waiting for slower ranks included."""
        self._step_timeout_s = step_timeout_s
        self._delay = 0.0
        self._owed = 0.0
        """Seconds of emulated delay that were not waited for yet."""
        self._group: Any = _translated(
            lambda: _meet(run_directory, rank, ranks, step_timeout_s, join_timeout_s),
            f"join of {ranks} ranks",
            join_timeout_s,
        )

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' tensors of the same shape and dtype, in rank order: [ranks, *mine.shape]."""
        # An all-to-all of copies takes one round. gloo's all_gather would go around a ring.
        copies = mine.reshape(-1).repeat(self.ranks)
        found = torch.empty_like(copies)
        self._run(lambda: self._group.alltoall_base(found, copies, [], []).wait(), "all_gather")
        return found.view(self.ranks, *mine.shape)

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Exchange rows [sum(send), H], ordered by destination rank. Return [sum(receive), H], ordered by
        source rank."""
        outgoing = bytes_of(rows)
        found = torch.empty((sum(receive), outgoing.shape[1]), dtype=torch.uint8)
        self._run(
            lambda: self._group.alltoall_base(found, outgoing, list(receive), list(send)).wait(), "all_to_all"
        )
        return found.view(rows.dtype)

    def share(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Bring bytes of every rank to every rank, in rank order. sizes: lengths by rank, known to all."""
        copies = torch.frombuffer(bytearray(mine) * self.ranks or bytearray(1), dtype=torch.uint8)
        outgoing = copies[: len(mine) * self.ranks].view(-1, 1)
        found = self.all_to_all(outgoing, [len(mine)] * self.ranks, sizes)
        flat, ends = found.numpy().reshape(-1), list(accumulate(sizes))
        return [flat[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the int64 numbers of every rank, in rank order. No rank returns before all have called
        it."""
        found: list[list[int]] = self.all_gather(torch.tensor(list(numbers), dtype=torch.int64)).tolist()
        return found

    def slow_collectives(self, seconds: float) -> None:
        """Emulate a network: every collective from now on takes this much longer."""
        self._delay = seconds

    def wait(self, seconds: float) -> None:
        """Emulate a network: wait, and count that as time in collectives. Short waits are put together,
        because a timer takes up to 0.1 ms too long, which the next ones make up for."""
        self._owed += seconds
        if self._owed < _SHORTEST_WAIT:
            return
        begun = time.perf_counter()
        time.sleep(self._owed)
        waited = time.perf_counter() - begun
        self._owed -= waited
        self.seconds += waited

    def close(self) -> None:
        """Leave the group. The others get PeerLost in their next call."""
        self._group.shutdown()

    def _run(self, call: Callable[[], object], what: str) -> None:
        self.collectives += 1
        if self._delay:
            self.wait(self._delay)
        begun = time.perf_counter()
        _translated(call, what, self._step_timeout_s)
        self.seconds += time.perf_counter() - begun


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """View rows [n, H] as uint8 [n, bytes of a row]. Copies only if they are not contiguous."""
    if not rows.numel():
        return torch.empty((rows.shape[0], rows.shape[1] * rows.element_size()), dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8)


def _meet(run_directory: Path, rank: int, ranks: int, step_timeout_s: float, join_timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # The type stubs lack most of the class.
    store = FileStore(str(run_directory / "rendezvous"), ranks)
    # gloo connects under the step timeout, so first wait, with the longer join timeout, until every rank has
    # arrived.
    store.set(f"here/{rank}", "")
    _await_all(store, ranks, join_timeout_s)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=step_timeout_s)
    options._threads = 1
    return gloo(store, rank, ranks, options)


def _await_all(store: FileStore, ranks: int, join_timeout_s: float) -> None:
    """Wait until every rank has arrived. PeerTimeout names the missing ranks."""
    try:
        store.wait([f"here/{rank}" for rank in range(ranks)], timedelta(seconds=join_timeout_s))
    except RuntimeError as error:
        missing = [str(rank) for rank in range(ranks) if not store.check([f"here/{rank}"])]
        raise PeerTimeout(
            f"join of {ranks} ranks: rank {', '.join(missing) or '?'} did not arrive within"
            f" {join_timeout_s:g} s; see why in its own log"
        ) from error


def _translated(call: Callable[[], _T], what: str, timeout_s: float) -> _T:
    """Run a call of torch.distributed, and classify its RuntimeErrors by their text."""
    try:
        return call()
    except RuntimeError as error:
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise PeerTimeout(f"{what}: a rank was silent for {timeout_s:g} s: {text}") from error
        raise PeerLost(f"{what}: the connection to another rank broke: {text}") from error


class StepSync:
    """Step headers and sleep of one rank. `exchange` and `sleep` are for the step thread. `nudge` is
    thread-safe."""

    def __init__(self, run_directory: Path, rank: int = 0, group: RankGroup | None = None) -> None:
        """Bind this rank's control socket in the run directory, which belongs to this incarnation. group:
        None for an engine of one rank.

        StepSyncError when the socket cannot be bound there.
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
        """Collectives of this rank so far. An engine of one rank needs none."""
        return 0 if self._group is None else self._group.collectives

    @property
    def communication_seconds(self) -> float:
        """Seconds that this rank has spent in collectives so far, waiting for slower ranks included."""
        return 0.0 if self._group is None else self._group.seconds

    def exchange(self, header: StepHeader) -> tuple[StepHeader, ...]:
        """Exchange this step's headers and return them in rank order. PeerLost, PeerTimeout. StepMismatch
        when the ranks are at different steps, serve different epochs, or have different placements of one
        epoch."""
        if self._group is None:
            return (header,)
        found = self._group.all_gather(torch.tensor(header, dtype=torch.int64))
        headers = tuple(StepHeader(*fields) for fields in found.tolist())
        if any(other.step != header.step for other in headers):
            raise StepMismatch(
                f"rank {self.rank} is at step {header.step}, the ranks at"
                f" {[other.step for other in headers]}; the engine must be restarted"
            )
        if any(other.epoch_served != header.epoch_served for other in headers):
            served = [other.epoch_served for other in headers]
            raise StepMismatch(
                f"rank {self.rank} serves epoch {header.epoch_served}, the ranks {served}; the engine must be"
                " restarted"
            )
        pair = disagreement([one.epoch_ready for one in headers], [one.digest for one in headers])
        if pair is not None:
            known, other = (headers[rank] for rank in pair)
            raise StepMismatch(
                f"ranks {pair[0]} and {pair[1]} have different placements of epoch {other.epoch_ready}, with"
                f" digests {known.digest} and {other.digest}; the engine must be restarted"
            )
        return headers

    def share(self, note: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Bring every rank's note to every rank, in rank order. sizes: as in the headers. All ranks call it
        together. PeerLost, PeerTimeout."""
        return [note] if self._group is None else self._group.share(note, sizes)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """As `RankGroup.gather`."""
        return [list(numbers)] if self._group is None else self._group.gather(numbers)

    def sleep(self, step: int) -> None:
        """Block without CPU use until this rank is nudged (it then wakes all others) or another rank wakes it
        for `step`.

        Called by all ranks before the same step. One earlier nudge counts. PeerLost when a peer is gone.
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
        """End this rank's sleep, or its next one at once, because it has work. Thread-safe; never blocks."""
        try:
            self._nudge.send(b"n")
        except BlockingIOError:
            return  # The buffer is already full of nudges.

    def close(self) -> None:
        """Close the sockets. Must not be called during `sleep`: nudge it first."""
        for one in (self._control, self._nudged, self._nudge):
            one.close()
        self._path.unlink(missing_ok=True)

    def _woken_for(self, step: int) -> bool:
        """Read all pending wakes. True if one is for this sleep and not left over from an earlier one."""
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
        raise PeerTimeout(f"{peer}: the control socket accepts nothing; the rank is frozen") from error
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
        raise StepSyncError(
            f"{path}: too long for a unix socket ({_LONGEST_SOCKET_PATH} bytes at most); choose a shorter run"
            " directory"
        )
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        control.bind(path)
    except OSError as error:
        control.close()
        raise StepSyncError(
            f"{path}: cannot bind the control socket: {error.strerror}; every start of an engine needs its"
            " own run directory"
        ) from error
    control.setblocking(False)
    return control
