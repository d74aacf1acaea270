"""Workers of one start of vLLM, that is its expert ranks: the map that each serves, holds or votes for
(`engine_adapter.engine.Rearranger`), and the digests of their experts.

Methods are called from one event loop. Nothing here waits for a worker: messages are sent and forgotten, and
what a worker says counts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import WorkerMap
from engine_adapter.vllm.wire import (
    DropMap,
    ExpertDigests,
    FromAgent,
    LinkError,
    MapMoved,
    MapStatus,
    PermitVote,
    RoutedRequest,
    SlotMismatch,
    StageMap,
    WorkerDemand,
    WorkerHello,
    map_digest,
)
from fleet.placement import Placement

Report = WorkerDemand | RoutedRequest | MapMoved
Table = NDArray[np.int16]
_SHARED = ("ranks", "targets", "model", "layers", "experts", "slots", "top_k", "all2all")
_KEPT_EPOCHS = 64
log = logging.getLogger(__name__)


class WorkerConnection(Protocol):
    """Connection to one worker."""

    def send(self, message: FromAgent) -> None:
        """Send a message, or lose it. Never blocks."""
        ...

    def close(self) -> None:
        """End the connection soon."""
        ...


class BadWorker(ValueError):
    """A worker says what cannot be true; the text goes back to it."""


class WorkerMaps:
    """Workers of one start of vLLM. `complete` once all are connected."""

    def __init__(self, hello: WorkerHello, epoch: int) -> None:
        """hello: of the first worker, which says what all must say. epoch: of the initial map, if no worker
        knows one. BadWorker when the first one is wrong."""
        self.instance = hello.instance
        self.hello = hello
        self.fault = ""
        self.refusal = ""
        """Why the plugin takes no placements of this vLLM from the start. Empty: it takes them."""
        self.replaced = False
        """True once a map is in force that no handover brought: vLLM's own policy chose it."""
        self.epoch = epoch
        """Epoch of the initial map."""
        self.on_report: Callable[[int, Report, int | None], None] | None = None
        """Takes the reports of a rank, with the epoch of the map they belong to. None: they are dropped."""
        self.nudge_target: Callable[[], Awaitable[None]] | None = None
        self._links: dict[int, WorkerConnection] = {}
        self._hellos: dict[int, WorkerHello] = {}
        self._status: dict[int, MapStatus] = {}
        self._tables: dict[str, Table] = {}
        self._epochs: dict[str, int] = {}
        """By digest, the epoch in which a map was served last."""
        self._digests: list[list[str]] = [[""] * hello.experts for _ in range(hello.layers)]
        self._placement = self._read(hello.map, epoch)
        self._complete_before = False
        self._difference = ""
        """Last difference between the workers' maps that was logged."""
        self._change: asyncio.Future[None] | None = None

    # the port

    @property
    def ranks(self) -> int:
        return self.hello.ranks

    @property
    def placement(self) -> Placement:
        return self._placement

    def status(self, rank: int) -> WorkerMap | None:
        status = self._status.get(rank)
        if status is None or rank not in self._links:
            return None
        return WorkerMap(
            status.state,
            status.handover,
            status.digest,
            status.served,
            status.flipped,
            status.epoch or self.epoch,
            status.reason,
            status.layers_done,
        )

    def stage(self, rank: int, handover: int, placement: Placement) -> None:
        if self.fault:
            log.warning("handover %d is not staged on expert rank %d: %s", handover, rank, self.fault)
            return
        in_force = map_digest(self._placement.expert_of_slot, self.hello.experts)
        digest = self._remember(placement.expert_of_slot)
        self._epochs[digest] = placement.epoch
        content = placement.expert_of_slot.astype("<i2").tobytes()
        self._send(rank, StageMap(handover=handover, epoch=placement.epoch, replaces=in_force, map=content))

    def permit(self, rank: int, handover: int) -> None:
        self._send(rank, PermitVote(handover=handover))

    def drop(self, rank: int, handover: int, reason: str) -> None:
        self._send(rank, DropMap(handover=handover, reason=reason))

    async def changed(self) -> None:
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._change)

    async def nudge(self) -> None:
        if self.nudge_target is not None:
            await self.nudge_target()

    # workers

    @property
    def complete(self) -> bool:
        """True while every expert rank is connected."""
        return len(self._links) == self.ranks

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the connected workers, by rank."""
        return {rank: self._hellos[rank].pid for rank in sorted(self._links)}

    @property
    def expert_digests(self) -> tuple[tuple[str, ...], ...]:
        """Digests of all experts, [layers][experts]; empty until all are known."""
        whole = all(all(layer) for layer in self._digests)
        return tuple(map(tuple, self._digests)) if whole else ()

    def epoch_of(self, digest: str) -> int | None:
        """Return the epoch in which a map was served last. None: it never was, as far as is known here."""
        return self._epochs.get(digest)

    def epoch_for(self, hello: WorkerHello) -> int:
        """Return the epoch of the map that a worker serves, if the worker knows none. 0: it is not the
        initial map in force, so vLLM's own policy chose it. Its epoch must be above all on record, and
        belongs to a new start (`replaced`)."""
        initial = self._placement.epoch == self.epoch
        same = hello.map == self._placement.expert_of_slot.astype("<i2").tobytes()
        return self.epoch if initial and same else 0

    def join(self, hello: WorkerHello, link: WorkerConnection) -> None:
        """Add a worker, or one that has connected again: its earlier connection is closed. BadWorker when it
        contradicts the others."""
        for name in _SHARED:
            mine, others = getattr(hello, name), getattr(self.hello, name)
            if mine != others:
                raise BadWorker(f"{name} is {mine!r} here and {others!r} on expert rank {self.hello.rank}")
        if not 0 <= hello.rank < self.ranks or not 0 <= hello.target < hello.targets:
            raise BadWorker(
                f"expert rank {hello.rank} of {hello.ranks}, target {hello.target} of {hello.targets}"
            )
        table = self._table(hello.map)
        digest = self._remember(table)
        earlier = self._links.get(hello.rank)
        if earlier is not None:
            earlier.close()
        self._links[hello.rank], self._hellos[hello.rank] = link, hello
        status = MapStatus(
            state=hello.state,
            handover=hello.handover,
            digest="",
            served=digest,
            flipped=hello.flipped,
            epoch=hello.epoch,
        )
        if hello.missing:
            self.refusal = f"vLLM {hello.engine} lacks what the plugin needs: {', '.join(hello.missing)}"
        elif hello.refuses:
            self.refusal = hello.refuses
        self._said(hello.rank, status)

    def leave(self, rank: int, link: WorkerConnection) -> None:
        """Remove a worker whose connection has ended, unless it has connected again."""
        if self._links.get(rank) is link:
            del self._links[rank]
            self._changed()

    def receive(self, rank: int, link: WorkerConnection, message: msgspec.Struct) -> None:
        """Take a message of a worker. BadWorker for one that cannot be true.

        What an earlier connection still brings is dropped: it is older than the worker's introduction."""
        if self._links.get(rank) is not link:
            return
        match message:
            case MapStatus():
                self._said(rank, message)
            case MapMoved():
                self._remember(self._table(message.map))
                self._report(rank, message, map_digest(self._table(message.map), self.hello.experts))
                self._settle()
            case WorkerDemand():
                self._report(rank, message, message.served)
            case RoutedRequest():
                self._report(rank, message, self._status[rank].served)
            case ExpertDigests():
                self._compare(rank, message)
            case SlotMismatch():
                self._fail(
                    f"slot {message.slot} of layer {message.layer} does not hold the weights of expert"
                    f" {message.expert}: digest {message.found}, expected {message.expected}"
                )
            case LinkError():
                log.warning("expert rank %d of %s says: %s", rank, self.hello.model, message.reason)
            case _:
                raise BadWorker(f"{type(message).__name__} was not expected here")

    # inside

    def _send(self, rank: int, message: FromAgent) -> None:
        link = self._links.get(rank)
        if link is not None:
            link.send(message)

    def _said(self, rank: int, status: MapStatus) -> None:
        before = self._status.get(rank)
        self._status[rank] = status
        self._settle()
        if status != before or not self._complete_before:
            self._changed()
        self._complete_before = self.complete

    def _settle(self) -> None:
        """Set the placement in force when all workers serve the same map."""
        if not self.complete:
            return
        served = {self._status[rank].served for rank in range(self.ranks)}
        if len(served) > 1:
            self._tell_difference()
            return
        (digest,) = served
        table = self._tables.get(digest)
        epoch = max(status.epoch for status in self._status.values()) or self.epoch
        if table is None:
            return
        same = np.array_equal(table, self._placement.expert_of_slot)
        if epoch == self._placement.epoch and same:
            return
        if epoch <= self._placement.epoch and not same:
            self.replaced = True
            self._changed()
            return
        self._placement = self._as_placement(table, epoch)
        self._changed()

    def _tell_difference(self) -> None:
        """Log that the workers serve different maps, unless a vote is being carried out."""
        maps = ", ".join(f"{rank}: {self._status[rank].served}" for rank in range(self.ranks))
        settled = all(status.state in ("idle", "refused") for status in self._status.values())
        if settled and maps != self._difference:
            self._difference = maps
            log.error("the expert ranks of %s serve different maps: %s", self.hello.model, maps)

    def _as_placement(self, table: Table, epoch: int) -> Placement:
        digest = map_digest(table, self.hello.experts)
        self._epochs.pop(digest, None)
        self._epochs[digest] = epoch
        while len(self._epochs) > _KEPT_EPOCHS:
            gone = next(iter(self._epochs))
            del self._epochs[gone]
            self._tables.pop(gone, None)
        return Placement(
            table,
            experts=self.hello.experts,
            ranks=self.ranks,
            epoch=epoch,
            duplicates=True,
            attention=self.hello.attention,
        )

    def _read(self, content: bytes, epoch: int) -> Placement:
        table = self._table(content)
        self._remember(table)
        return self._as_placement(table, epoch)

    def _table(self, content: bytes) -> Table:
        width = self.ranks * self.hello.slots
        if len(content) != 2 * self.hello.layers * width:
            raise BadWorker(
                f"the map has {len(content)} bytes, expected {2 * self.hello.layers * width} for"
                f" [{self.hello.layers}, {width}] int16"
            )
        table = np.frombuffer(content, "<i2").reshape(self.hello.layers, width).astype(np.int16)
        try:
            Placement(table, experts=self.hello.experts, ranks=self.ranks, duplicates=True)
        except ValueError as error:
            raise BadWorker(str(error)) from error
        return table

    def _remember(self, table: Table) -> str:
        digest = map_digest(table, self.hello.experts)
        self._tables[digest] = table
        return digest

    def _report(self, rank: int, message: Report, digest: str) -> None:
        if self.on_report is not None:
            self.on_report(rank, message, self.epoch_of(digest))

    def _compare(self, rank: int, message: ExpertDigests) -> None:
        """Compare the digests of a rank's experts with those of all copies seen so far."""
        table = self._tables.get(message.served)
        if table is None:
            return
        slots = self.hello.slots
        own = table[:, rank * slots : (rank + 1) * slots]
        if [len(layer) for layer in message.digests] != [slots] * len(own):
            raise BadWorker(f"digests must be [{len(own)}][{slots}], one of each expert on this rank")
        for layer, digests in enumerate(message.digests):
            self._compare_layer(rank, layer, own[layer].tolist(), digests)

    def _compare_layer(self, rank: int, layer: int, experts: Sequence[int], digests: Sequence[str]) -> None:
        known = self._digests[layer]
        for slot, (expert, digest) in enumerate(zip(experts, digests, strict=True)):
            if digest and known[expert] and digest != known[expert]:
                self._fail(
                    f"the copy of expert {expert} of layer {layer} in slot {slot} of expert rank {rank} has"
                    f" the digest {digest}, others {known[expert]}"
                )
            known[expert] = known[expert] or digest

    def _fail(self, reason: str) -> None:
        if not self.fault:
            log.error("%s takes no placements any more: %s", self.hello.model, reason)
            self.fault = reason
            self._changed()

    def _changed(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        self._change = None
