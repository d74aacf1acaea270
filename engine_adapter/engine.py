"""The Engine port: the interface between the agent and one rank of any engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.dispatch import SPLIT
from fleet.experts import ModelShape
from fleet.facts.activity import RearrangementTime
from fleet.facts.dynamo_kv import KvBlock, KvChange
from fleet.facts.engine_kinds import EngineKind
from fleet.facts.engines import FIXED_ATTENTION, UNSHARDABLE, Capabilities, ServedModel
from fleet.layout_times import LayoutTimes
from fleet.placement import Placement
from fleet.timing import EngineSpeed


class RankMemory(NamedTuple):
    """Memory of a rank beside its expert cells, in bytes. Constant while its process runs."""

    attention: int = 0
    """Weights of attention, with its norms and its table of positions."""
    other_weights: int = 0
    """All other weights beside experts: embeddings, gates, last norm and output."""
    kv_pool: int = 0
    communicators: int = 0
    """Growth of the process's private memory while connections to other ranks were opened."""
    runtime: int = 0
    """Private memory when the engine began to load: the interpreter and data of libraries."""
    note: str = ""
    """`MemoryDescribed.note`."""
    ranks_in_process: int = 1
    """`MemoryDescribed.ranks_in_process`."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a rank that stay constant while its process runs. `shape` is None for engines that
    report no experts."""

    kind: EngineKind | Literal[""] = ""
    """`EngineJoined.engine_kind`."""
    model: str
    models: tuple[ServedModel, ...] = ()
    """`EngineJoined.models`."""
    rank: int
    """Target that the router chooses: a data-parallel rank."""
    ranks: int
    rank_header: str = ""
    """`EngineJoined.rank_header`."""
    block_size: int
    kv_blocks: int
    kv_block_bytes: int = 0
    """Memory of one KV block over all layers, in bytes. 0: unknown."""
    max_context: int
    max_batch_tokens: int
    capabilities: Capabilities
    shape: ModelShape | None = None
    unshardable: str = UNSHARDABLE
    """`EngineJoined.unshardable`."""
    tp_refusal: str = FIXED_ATTENTION
    """`EngineJoined.tp_refusal`."""
    dispatch: str = SPLIT
    """Replica selection: a `fleet.dispatch.DispatchRule`."""
    speed: EngineSpeed | None = None
    tp_speed: EngineSpeed | None = None
    """`EngineJoined.tp_speed`."""
    layout_times: tuple[LayoutTimes, ...] = ()
    """`EngineJoined.layout_times`."""
    hardware: str = ""
    """`EngineJoined.hardware`."""
    tokenizer: bytes | None = None
    """Zip archive of tokenizer.json and tokenizer_config.json, or None."""
    weights_digest: str | None = None
    """`EngineJoined.weights_digest`. The value of the first rank is used."""
    rearranges: bool = False
    """`EngineJoined.rearranges`."""
    gathers_all: bool = False
    """`EngineJoined.gathers_all`."""
    memory: RankMemory | None = None
    """None: unknown."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Current load of one rank."""

    running: int
    waiting: int
    prefill_tokens: int
    """Prompt tokens that are admitted or waiting and not yet computed."""
    decode_blocks: int
    """KV blocks held by running sequences."""
    used_blocks: int
    """KV blocks held by running sequences or kept for reuse."""
    step_seconds: float | None = field(default=None, compare=False)
    """Median duration of the engine's recent decode-only steps. None: there were none recently. The value
    changes with every step, so a change of this field alone does not trigger a load report."""
    reading: int = 0
    """Number of the reading, of an engine whose load is read from time to time: each reading is reported
    once, even if it equals the one before. A report that repeats an old reading would hide what was booked
    since."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Expert activations since the last `take_facts`. counts: int64 [layers, experts] (token, k) pairs.
    tokens: computed tokens. cached_tokens: tokens reused from the KV cache."""

    counts: NDArray[Any]
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class DispatchCounts:
    """Dispatch statistics of one rank over some steps of one epoch: where the tokens of its requests were
    sent, and the load that the rank served. A step counts once it is complete.

    Arrays are float64 [layers], summed over the steps. Sharded layers are zero.
    """

    epoch: int
    steps: int
    """Engine steps in which any rank had a token."""
    step_seconds: float
    """Total duration of these steps."""
    tokens: int
    """Tokens of this rank's requests."""
    pairs: int
    """(token, k) pairs of these tokens in one layer."""
    remote_ranks: NDArray[np.float64]
    """Distinct other ranks that each of these tokens was sent to, summed over the tokens."""
    local: NDArray[np.float64]
    """Pairs of these tokens that this rank served itself."""
    served: NDArray[np.float64]
    """Pairs that this rank served for the requests of all ranks."""
    balance: NDArray[np.float64]
    """Mean / highest load of a rank in pairs. 1 for a step without pairs."""
    communication_seconds: float | None = None
    """Part of `step_seconds` spent on sending to other ranks and waiting for them. None: the engine does not
    measure it."""
    rearrangements: tuple[RearrangementTime, ...] = ()
    """Map changes since the last report, of an engine that moves its experts itself."""

    def with_more(self, more: "DispatchCounts") -> "DispatchCounts":
        """Add the counts of further steps of the same epoch. ValueError when the epochs differ."""
        if more.epoch != self.epoch:
            raise ValueError(
                f"cannot add dispatch counts of epoch {more.epoch} to those of epoch {self.epoch}"
            )
        return DispatchCounts(
            epoch=self.epoch,
            steps=self.steps + more.steps,
            step_seconds=self.step_seconds + more.step_seconds,
            tokens=self.tokens + more.tokens,
            pairs=self.pairs + more.pairs,
            remote_ranks=self.remote_ranks + more.remote_ranks,
            local=self.local + more.local,
            served=self.served + more.served,
            balance=self.balance + more.balance,
            communication_seconds=_sum(self.communication_seconds, more.communication_seconds),
            rearrangements=self.rearrangements + more.rearrangements,
        )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def balance(served: NDArray[Any]) -> NDArray[np.float64]:
    """Return the balancedness, mean / highest load, as float64 [...]. served: [..., ranks] pairs that each
    rank serves. 1 where there is no load."""
    highest = served.max(axis=-1)
    return np.asarray(
        np.where(highest > 0, served.mean(axis=-1) / np.maximum(highest, np.finfo(np.float64).tiny), 1.0),
        np.float64,
    )


class RoutedExperts(Protocol):
    """Experts chosen for the tokens of one request, by position."""

    @property
    def positions(self) -> int:
        """Number of positions up to the last computed one. 0 when nothing was computed."""
        ...

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes."""
        ...

    def chosen(self) -> NDArray[np.int16]:
        """Return int16 [positions, layers, k]. `fleet.routings.UNKNOWN` where nothing was computed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EndedRequest:
    """A finished request, whatever its outcome, for which this rank computed at least one token.

    A position that was computed twice (after a preemption) counts once. Positions reused from the KV cache
    were not computed. They are UNKNOWN in `routed` because they activated no expert here.
    """

    decision: str
    """ID of the routing decision that sent the request here. Empty when unknown."""
    prompt_tokens: int
    """Positions of the client's prompt. All later positions are completion, including those that a
    continuation had to recompute."""
    trace: RoutedExperts
    blocks: Sequence[KvBlock]
    """Hashes of the full blocks from the start of the prompt. There may be one more block than the positions
    of `routed` fill. Immutable."""

    @property
    def nbytes(self) -> int:
        """Approximate memory kept alive by this object."""
        return self.trace.nbytes + 64 * len(self.blocks)

    @property
    def routed(self) -> NDArray[np.int16]:
        """[positions, layers, k] chosen experts. `fleet.routings.UNKNOWN` where nothing was computed. Ends
        with the last computed position. A simulated engine builds the table on each access."""
        return self.trace.chosen()


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Events of a rank since the last `take_facts`, in order."""

    kv: tuple[KvChange | Literal["cleared"], ...]
    """Stored and removed blocks, in order. The string "cleared" means that all blocks were removed. After a
    change of attention it comes first, no earlier than `Engine.placement` is the new one."""
    load: RankLoad
    activations: Activations | None
    ended: tuple[EndedRequest, ...] = ()
    """Finished requests, in order. Bounded in bytes."""
    ended_lost: int = 0
    """Older finished requests that were dropped before they were taken."""
    sent: tuple[DispatchCounts, ...] = ()
    """Dispatch statistics, one entry per epoch served since the last call, in order. Empty when no step
    ran."""


class EngineFailed(Exception):
    """The engine cannot continue. The text states the reason. An engine fails as a unit."""


class CellTensor(NamedTuple):
    """One tensor of an expert and its position in a cell."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the cell."""
    bytes: int


class ExpertMemory(Protocol):
    """Expert memory of a rank: cells of equal size in one mapping whose address is fixed while the process
    runs. There are more cells than slots. Cells without a slot receive incoming experts."""

    @property
    def tensors(self) -> tuple[CellTensor, ...]:
        """Tensors of an expert in a cell, weights and scales alike, in order and without overlap."""
        ...

    @property
    def parts(self) -> int:
        """Parts of an expert: as many as the engine has ranks, or 1 where experts cannot be cut. A cell is
        large enough for either form of a layer (`transfer.parts`)."""
        ...

    @property
    def cells(self) -> int: ...

    @property
    def cell_bytes(self) -> int: ...

    @property
    def base(self) -> int:
        """Address of cell 0. The cells are contiguous."""
        ...

    @property
    def descriptor(self) -> int:
        """File descriptor of the mapped file, mapped from offset 0, so that other processes of this machine
        can map it too. -1: the mapping has no file."""
        ...

    def cell(self, number: int) -> NDArray[np.uint8]:
        """Return a view of the cell's memory, uint8 [cell_bytes]. IndexError when there is no such cell."""
        ...


class Adoption(Protocol):
    """A placement that a rank is prepared to serve. Created by `Experts.prepare`."""

    @property
    def placement(self) -> Placement: ...


class Experts(Protocol):
    """Operations that a handover needs from a rank. The agent calls them from its event loop, and they never
    block it."""

    @property
    def memory(self) -> ExpertMemory: ...

    @property
    def cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots_per_rank]: the cell of each slot of this rank in the served epoch. Empty slots
        have a cell too."""
        ...

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> Adoption:
        """Do all slow preparation for the placement of the next epoch. `cells` maps this rank's slots to
        cells. The served placement does not change. A cancelled call drops what it prepared."""
        ...

    async def adopt(self, adoption: Adoption) -> None:
        """Mark this rank as ready for the placement, and return once it is served. The engine serves it from
        the first step at which all ranks are ready. This cannot be undone. EngineFailed when the engine ends
        first."""
        ...

    def forget(self, adoption: Adoption) -> None:
        """Drop a prepared placement, because its handover was aborted."""
        ...


class WorkerMap(NamedTuple):
    """Map state of one expert rank of an engine that moves its experts itself, as its worker last reported
    it."""

    state: Literal["idle", "staged", "voting", "refused"]
    """idle: holds no map (with a `reason`: that of `handover` was rejected, or dropped before the permission
    to vote). staged: holds a validated map, and votes for none. voting: votes for the map that it holds.
    refused: dropped a map that it may have voted for, serves the old one, and never votes for that map
    again."""
    handover: int
    """Number of the map that is held or was dropped. 0: none since the worker started."""
    digest: str
    """Digest of the map that is held. Empty: none."""
    served: str
    """Digest of the map in force on this worker."""
    flipped: int
    """Number of the last handover that this worker carried out. 0: none since it started."""
    epoch: int
    """Epoch of the map in force."""
    reason: str = ""
    """Why the map was refused or dropped."""
    layers_done: int = 0
    """Layers of the new map that are in force already, while layers are committed one at a time. Otherwise 0
    or the number of layers."""


class Rearranger(Protocol):
    """Carries maps to the expert ranks of an engine that moves its experts itself. Methods never block, and a
    message may be lost: only a change of status is an answer."""

    @property
    def ranks(self) -> int:
        """Number of expert ranks: `Placement.ranks`, not the number of targets."""
        ...

    @property
    def placement(self) -> Placement:
        """The map in force with its epoch. Changes once every expert rank serves the new one."""
        ...

    @property
    def fault(self) -> str:
        """Why no map may be staged any more, such as weights that are not those of their expert. Empty:
        none."""
        ...

    def status(self, rank: int) -> WorkerMap | None:
        """Return the last report of an expert rank's worker. None: it is not connected."""
        ...

    def stage(self, rank: int, handover: int, placement: Placement) -> None:
        """Send a map to one worker, to be validated and held."""
        ...

    def permit(self, rank: int, handover: int) -> None:
        """Permit one worker to vote for the map that it holds."""
        ...

    def drop(self, rank: int, handover: int, reason: str) -> None:
        """Ask one worker to drop the map that it holds, unless the vote for it has passed. A number that
        never arrived is past from then on."""
        ...

    async def changed(self) -> None:
        """Wait until the status of any worker, or `fault`, changes."""
        ...

    async def nudge(self) -> None:
        """Send a short request of the agent's own to one target, so that an idle engine makes steps."""
        ...


class Engine(Protocol):
    """One rank of an engine, as its agent sees it. Methods are called from one event loop and never block
    it."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def placement(self) -> Placement | None:
        """The served placement. Its epoch is the engine's epoch."""
        ...

    @property
    def handover_seconds(self) -> float:
        """Expected delay that a handover in progress adds to a request that arrives now. 0: no handover is in
        progress."""
        ...

    @property
    def experts(self) -> Experts | None:
        """Expert operations for handovers. None: this engine cannot move its experts."""
        ...

    async def start(self) -> None:
        """Get ready to serve. On return, `description` is final. EngineFailed when the engine cannot
        start."""
        ...

    async def wait_facts(self) -> None:
        """Wait until there are new facts to take. Returns soon after a step, not at every step."""
        ...

    def take_facts(self) -> RankFacts:
        """Drain the events since the last call. Must be cheap: it is called up to about 20 times a second."""
        ...

    async def run(self) -> None:
        """Serve until cancelled or until EngineFailed is raised. On cancellation, stop cleanly within a
        bounded time."""
        ...
