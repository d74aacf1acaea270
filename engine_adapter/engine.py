"""The Engine port: what the agent asks of one rank of any engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.dispatch import SPLIT
from fleet.events import Capabilities, KvBlock, KvChange
from fleet.experts import ModelShape
from fleet.layout import Layout
from fleet.placement import Placement
from fleet.timing import EngineSpeed


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a rank lives. `shape`, `placement` and `layout` are None for engines that say nothing of experts."""

    model: str
    rank: int
    ranks: int
    block_size: int
    kv_blocks: int
    kv_block_bytes: int = 0
    """memory of one, with all layers; 0: not known"""
    max_context: int
    max_batch_tokens: int
    capabilities: Capabilities
    shape: ModelShape | None = None
    layout: Layout | None = None
    dispatch: str = SPLIT
    """how replicas are chosen: one of `fleet.dispatch.DISPATCHES`"""
    speed: EngineSpeed | None = None
    tokenizer: bytes | None = None
    """a zip of tokenizer.json and tokenizer_config.json, or None"""
    weights_digest: str | None = None
    """`EngineJoined.weights_digest`; the first rank's counts"""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank's load now."""

    running: int
    waiting: int
    prefill_tokens: int
    """prompt tokens admitted or waiting, not yet computed"""
    decode_blocks: int
    """KV blocks held by running sequences"""
    used_blocks: int
    """KV blocks held by running sequences or kept for reuse"""
    step_seconds: float | None = field(default=None, compare=False)
    """median length of the engine's last steps in which nothing but decoding was done; None: there were none lately. It changes with every
    step, and is no news by itself"""


@dataclass(frozen=True, slots=True)
class Activations:
    """Experts activated since the facts were last taken. counts: int64 [layers, experts] (token, k) pairs; tokens: computed; cached: reused."""

    counts: NDArray[Any]
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class DispatchCounts:
    """Where the tokens of this rank's requests were sent in some steps of one epoch, and what this rank served. A step counts when it is over.

    Arrays are float64 [layers], sums over the steps; layers that are sharded have zeros.
    """

    epoch: int
    steps: int
    """of the engine, in which any rank had a token"""
    step_seconds: float
    """that these took, all together"""
    tokens: int
    """of this rank's requests"""
    pairs: int
    """(token, k) pairs of these tokens in one layer"""
    remote_ranks: NDArray[np.float64]
    """distinct other ranks that each of these tokens was sent to"""
    local: NDArray[np.float64]
    """of these pairs: that this rank served itself"""
    served: NDArray[np.float64]
    """pairs that this rank served, whoever's"""
    balance: NDArray[np.float64]
    """mean / highest load of a rank in pairs; 1 for a step without any"""
    communication_seconds: float | None = None
    """of `step_seconds`: spent sending to other ranks and waiting for them; None: the engine cannot tell"""

    def with_more(self, more: "DispatchCounts") -> "DispatchCounts":
        """These steps and those, which are of the same epoch; ValueError when they are not."""
        if more.epoch != self.epoch:
            raise ValueError(f"what was sent in epoch {more.epoch} does not add to that of epoch {self.epoch}")
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
        )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def balance(served: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [...] of [..., ranks] pairs that ranks serve: mean / highest ("balancedness"); 1 where there is nothing to serve."""
    most = served.max(axis=-1)
    return np.asarray(np.where(most > 0, served.mean(axis=-1) / np.maximum(most, np.finfo(np.float64).tiny), 1.0), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class EndedRequest:
    """A request that is over, however it ended, and of which at least one token was computed here.

    A position that was computed twice (after a preemption) is one position. One that was not computed, because the KV cache had it,
    is UNKNOWN in `routed`: it activated nothing here.
    """

    decision: str
    """id of the routing decision that brought it; empty when nobody said"""
    prompt_tokens: int
    """positions of the client's prompt; what comes behind is completion, also where a continuation had to compute it again"""
    routed: NDArray[np.int16]
    """[positions, layers, k] chosen experts, `fleet.routings.UNKNOWN` where nothing was computed; ends with the last computed position"""
    blocks: Sequence[KvBlock]
    """identities of the full blocks from the start of the prompt; perhaps one more than the positions of `routed` fill. Not changed any more"""

    @property
    def nbytes(self) -> int:
        """Memory that this keeps alive, more or less: the table is as large as it had grown."""
        table = self.routed if self.routed.base is None else self.routed.base
        return int(table.nbytes) + 64 * len(self.blocks)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Everything that happened on a rank since the last `take_facts`, in order."""

    kv: tuple[KvChange | Literal["cleared"], ...]
    """stored and removed blocks in order; the string "cleared" when all are gone"""
    load: RankLoad
    activations: Activations | None
    ended: tuple[EndedRequest, ...] = ()
    """requests that ended, in order; bounded in bytes"""
    ended_lost: int = 0
    """older ones that had to be let go before they were taken"""
    sent: tuple[DispatchCounts, ...] = ()
    """where tokens were sent, one per epoch that was served meanwhile, in order; empty: there was no step"""


class EngineFailed(Exception):
    """The engine cannot go on; the text says why. It fails as a unit."""


class CellTensor(NamedTuple):
    """One tensor of an expert, as it lies in a cell."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """bytes from the start of the cell"""
    bytes: int


class ExpertMemory(Protocol):
    """A rank's memory for experts: equal cells in one mapping, which stays where it is for the life of the process. There are more cells than
    slots; those that no slot is in are room for experts on their way in."""

    @property
    def tensors(self) -> tuple[CellTensor, ...]:
        """What a cell holds, weights and scales alike, in order, without overlap."""
        ...

    @property
    def cells(self) -> int: ...

    @property
    def cell_bytes(self) -> int: ...

    @property
    def base(self) -> int:
        """Address of cell 0; they lie one behind another."""
        ...

    @property
    def descriptor(self) -> int:
        """Of the file that the mapping is of, from its start, so that processes of this machine can map it too; -1: it is of none."""
        ...

    def cell(self, number: int) -> NDArray[np.uint8]:
        """uint8 [cell_bytes]: the memory itself."""
        ...


class Adoption(Protocol):
    """A placement that a rank has prepared to serve; made by `Experts.prepare`."""

    @property
    def placement(self) -> Placement: ...


class Experts(Protocol):
    """What a handover asks of a rank. Methods are for the agent's event loop and never block it."""

    @property
    def memory(self) -> ExpertMemory: ...

    @property
    def cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots_per_rank]: in which cell each slot of this rank is, in the epoch that is served; empty slots have one too."""
        ...

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> Adoption:
        """Make everything that takes time to make for a placement of the next epoch, with this rank's slots in these cells. Nothing changes."""
        ...

    async def adopt(self, adoption: Adoption) -> None:
        """Be ready for it from the next step on, and return once it is served: from the step at which all ranks were ready. It cannot be called
        back; EngineFailed when the engine ends before."""
        ...


class Engine(Protocol):
    """One rank of an engine, as its agent sees it. Methods are called from one event loop and never block it."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def placement(self) -> Placement | None:
        """The placement served now; its epoch is the engine's."""
        ...

    @property
    def handover_seconds(self) -> float:
        """What a handover in progress is expected to cost a request that comes now; 0: none is under way."""
        ...

    @property
    def experts(self) -> Experts | None:
        """What handovers go through; None: this engine's experts stay where they are."""
        ...

    async def start(self) -> None:
        """Become able to serve; returns when `description` is final. EngineFailed when that is impossible."""
        ...

    async def wait_facts(self) -> None:
        """Return when there is something new to take (soon after, not at, every step)."""
        ...

    def take_facts(self) -> RankFacts:
        """Drain what happened. Cheap: called up to some twenty times a second."""
        ...

    async def run(self) -> None:
        """Serve until cancelled (then stop cleanly, bounded) or until EngineFailed is raised."""
        ...
