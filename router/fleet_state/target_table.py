"""Target table: the ranks that may serve one model, as columns. An immutable snapshot, rebuilt when
membership or placement change. Pure.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.facts.engines import EngineJoined
from fleet.timing import EngineSpeed

Dialect = Literal["ids", "text"]
"""Request format of a model's ranks: token ids (a broken stream can be continued), or the client's own text.
"""

_Kind = TypeVar("_Kind", bound=np.generic)

REFERENCE = EngineSpeed(prefill_token=5e-5, step=1.5e-2, decode_sequence=1.5e-4, decode_block=0.0)
"""Speed assumed for engines that state none: the proportions of a GPU server, which suffice to compare them.
Its seconds are not real. They are neither shown nor used to refuse requests, and measurements multiply them
(`router.scheduling.speed_estimation`).
"""
MAX_REQUESTS = 2**62
"""Beyond any limit."""

SPEEDS = (
    "prefill_token_s",
    "prefill_pair_s",
    "step_s",
    "decode_sequence_s",
    "decode_block_s",
    "decode_token_block_s",
    "dispatch_s",
    "dispatch_node_s",
    "expert_read_s",
    "gather_token_s",
)
"""Columns of `TargetTable.speeds`, before the last one, `in_lockstep`."""

RankKey = tuple[int, int]
"""(worker_id, rank): the identity of a target. A worker_id is one incarnation of an engine."""


class Excluded(msgspec.Struct, frozen=True):
    """A rank that was not considered, with the reason."""

    engine: str
    rank: int
    reason: str


class Target(NamedTuple):
    """Destination of requests: a rank, or an entire engine that is one target (rank 0)."""

    engine: EngineJoined
    rank: int
    url: str
    key: RankKey
    name: str
    epoch: int | None
    """served placement epoch; None: no placement is known"""
    note: str | None
    """explanation of the expert term"""
    stated_speed: EngineSpeed | None
    """in the served layout; None: the engine states none"""
    max_batch_tokens: int
    """tokens of a step at most"""

    @property
    def speed(self) -> EngineSpeed:
        """The stated speed, or the reference."""
        return self.stated_speed or REFERENCE

    @property
    def rank_header(self) -> list[tuple[bytes, bytes]]:
        """Return the header that names the rank to a server that all ranks share; empty: none does."""
        name = self.engine.rank_header
        return [(name.lower().encode(), str(self.rank).encode())] if name else []


def columns(table: NDArray[_Kind], at: NDArray[np.intp]) -> NDArray[_Kind]:
    """Return the columns `at` (ascending) of a table [..., targets]. Usually these are all, and the table
    itself is returned at no cost.
    """
    return table if len(at) == table.shape[-1] else table[..., at]


@dataclass(frozen=True, slots=True)
class TargetTable:
    """Columns have one entry per target. `excluded`: ranks that can serve no request at present, with
    reasons.
    """

    model: str
    dialect: Dialect
    tokenizer: str | None
    """sha256 of the tokenizer's archive. Dialect "text": prompts are sent as text, but hashed and priced by
    their ids; None: by their text
    """
    sent_tokenizer: str | None
    """tokenizer of the ids that are sent; None: text is sent"""
    targets: tuple[Target, ...]
    excluded: tuple[Excluded, ...]
    index: dict[RankKey, int]
    rows: NDArray[np.intp]
    """columns of the load tables"""
    block_size: NDArray[np.int64]
    max_context: NDArray[np.int64]
    ranks: NDArray[np.int64]
    """ranks whose limits add up: those of an engine with tensor-parallel attention; otherwise 1"""
    max_requests: NDArray[np.int64]
    """concurrent requests that the ranks of each target declare; MAX_REQUESTS: none declared"""
    stated: NDArray[np.bool_]
    """the engine states its speed; otherwise the next ones come from `REFERENCE`"""
    prefill_token_s: NDArray[np.float64]
    """this and the next: `EngineSpeed`"""
    prefill_pair_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    decode_sequence_s: NDArray[np.float64]
    decode_block_s: NDArray[np.float64]
    decode_token_block_s: NDArray[np.float64]
    """decode_block_s per token of a block"""
    dispatch_s: NDArray[np.float64]
    dispatch_node_s: NDArray[np.float64]
    expert_read_s: NDArray[np.float64]
    """reading one expert, divided by the ranks of its engine, which share the reads of a step
    """
    gather_token_s: NDArray[np.float64]
    """collectives of the engine's sharded layers, per token; 0 where no layer is sharded"""
    engine: NDArray[np.intp]
    """number of each target's engine, from 0"""
    first: NDArray[np.intp]
    """[engines]: first target of each engine; an engine's targets are adjacent"""
    group: NDArray[np.intp]
    """this and the next: `engine` and `first` of a table [2, targets] with concatenated rows, as
    `lockstep_seconds` expects them
    """
    group_first: NDArray[np.intp]
    in_lockstep: NDArray[np.float64] | None
    """1 where an engine's targets step together, 0 where it has only one; None: 0 everywhere"""
    apart: bool
    """some engine has only one target"""
    pairs: bool
    """this and the next three: some target has a price for pairs of tokens, for other nodes, for reading
    experts, for sharded layers; terms without a price are not computed
    """
    far: bool
    reads: bool
    gathers: bool
    passes_fields: bool
    """some rank serves fields that Roost does not read; requests with such fields go only to such ranks"""
    approximate: NDArray[np.bool_]
    """the rank reports no KV events: its overlap is estimated from the prompts routed there"""
    block_sizes: tuple[int, ...]
    """distinct block sizes"""

    all_at: NDArray[np.intp]
    """0, 1, 2, ...: every target is a candidate"""
    guessed: tuple[RankKey, ...]
    """the ranks where `approximate`"""
    largest_context: int
    smallest_context: int
    kv_blocks: NDArray[np.float64]
    """KV blocks of each target; inf if unknown"""
    min_kv_blocks: float
    min_requests: int
    """least of `max_requests`"""
    adapter: str = ""
    """LoRA adapter under which the model's KV blocks are hashed; empty: none"""
    speeds: NDArray[np.float64] = field(init=False)
    """[SPEEDS, targets]: columns in one matrix, which the compiled form of a price reads at once"""

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in SPEEDS]
        columns.append(np.zeros(len(self.rows)) if self.in_lockstep is None else self.in_lockstep)
        object.__setattr__(self, "speeds", np.stack(columns, dtype=np.float64))
