"""Exchange of activations among the ranks of an engine, layer by layer.

In a whole layer, *dispatch* sends activations to the ranks of their experts and *combine* sends the results
back, by physical slot, in compact form. In a sharded layer every rank holds a part of every expert, so
*gather* brings it the activations of all ranks, and *reduce* adds up what the ranks computed.

Contract of every implementation, whatever the transport:

- `dispatch` returns the rows that this rank's slots must compute, and their offsets, in the form that a
  grouped matmul takes. Rows are sorted by physical slot, and within a slot by (source rank, token). Every
  non-empty group is padded to at least `group_rows` rows (padding repeats a real row). Results of padding
  rows are ignored.
- `combine` returns one row per (token, k) to the token's own rank, which adds them in k order in fp32. So a
  token's result depends neither on the location of its experts nor on the rest of the batch.
- `gather` returns the rows of all tokens of all ranks, sorted by expert, grouped and padded likewise.
- `reduce` weights the results of a token's pairs and adds them in k order on each rank. One fp32 row per
  token travels to the token's own rank, which adds the rows of all ranks in rank order. So a token's result
  does not depend on the rest of the batch. It differs from that of a whole layer in the last bits, because
  sums are added in another order.
- A handle is valid for one `combine` of the latest `dispatch`, or one `reduce` of the latest `gather`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.kernels import LayerLoops, compiled
from engine_adapter.embedded.kernels.row_operations import compiled_loops, weighted_sum
from engine_adapter.embedded.step_sync import RankGroup, bytes_of
from fleet.arrays import IntArray
from fleet.dispatch import Chooser
from fleet.placement import Placement

GROUP_ROWS = 4
"""Minimum rows of any matrix product by torch. With one torch thread, a row's result then has the same bits
in every batch, but for tiny matrices in bfloat16 (`least_rows`)."""
_SMALL_PRODUCT = 16**3
"""Multiplications of the largest bfloat16 product that torch computes by a kernel of its own, which adds in
another order than oneDNN's for larger ones."""

SMALL_GATHER_BYTES = 65536
"""Activation bytes per rank up to which each rank sends all its activations to all ranks. This saves a
collective, and latency dominates at that size."""


class DispatchError(Exception):
    """A dispatch or combine was rejected before anything was sent or computed."""


class CapacityError(DispatchError):
    """A rank has more tokens than configured."""


class ExpertIndexError(DispatchError, IndexError):
    """A token names an expert that the model does not have."""


class HandleError(DispatchError):
    """A handle was used twice, or is not of the latest dispatch."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Positions of n (token, expert) pairs among rows sorted by slot."""

    row_of_pair: IntArray
    """int64 [n]: the row of each pair."""
    pair_of_row: IntArray
    """int64 [rows]: the pair of each row. Padding repeats pair 0."""
    ends: NDArray[np.int32]
    """int32 [slots]: end of each slot's rows, padding included."""
    counts: IntArray
    """int64 [slots]: pairs of each slot, without padding."""


def least_rows(dtype: torch.dtype, values: int) -> int:
    """Return the minimum rows of a product with a matrix of this many values or more, so that a row's result
    has the same bits in every batch."""
    if compiled_loops(dtype) is not None:
        return 1
    return max(GROUP_ROWS, _SMALL_PRODUCT // values + 1) if dtype == torch.bfloat16 else GROUP_ROWS


def group_by_slot(slots: NDArray[Any], slot_count: int, min_rows: int = GROUP_ROWS) -> Groups:
    """Sort pairs by their physical slots [n], stably. Non-empty groups are padded to `min_rows`."""
    loops = compiled()
    return (
        _grouped(slots, slot_count, min_rows)
        if loops is None
        else _compiled_groups(loops, np.ascontiguousarray(slots, np.int64), slot_count, min_rows)
    )


def _compiled_groups(loops: LayerLoops, slots: IntArray, slot_count: int, min_rows: int) -> Groups:
    row_of_pair, ends = np.empty(len(slots), np.int64), np.empty(slot_count, np.int32)
    # No group gets more than min_rows - 1 rows of padding, and no pair more than one group.
    most = len(slots) + min(len(slots), slot_count) * (min_rows - 1)
    pair_of_row, counts = np.empty(most, np.int64), np.empty(slot_count, np.int64)
    rows = loops.group(
        slots.ctypes.data,
        len(slots),
        slot_count,
        min_rows,
        row_of_pair.ctypes.data,
        pair_of_row.ctypes.data,
        ends.ctypes.data,
        counts.ctypes.data,
    )
    return Groups(row_of_pair, pair_of_row[:rows], ends, counts)


def _grouped(slots: NDArray[Any], slot_count: int, min_rows: int) -> Groups:
    # Stable, so that rows of a slot stay in the order of (source rank, token): part of the contract above.
    order = np.argsort(slots, kind="stable")
    counts = np.bincount(slots, minlength=slot_count)
    sizes = np.where(counts > 0, np.maximum(counts, min_rows), 0)
    ends = np.cumsum(sizes)
    # Where a slot's rows begin with the padding of the slots before it, less where they begin without.
    shift = (ends - sizes) - (np.cumsum(counts) - counts)
    rows = np.arange(len(slots)) + shift[slots[order]]
    row_of_pair = np.empty(len(slots), np.int64)
    row_of_pair[order] = rows
    pair_of_row = np.zeros(int(ends[-1]), np.int64)
    pair_of_row[rows] = order
    return Groups(row_of_pair, pair_of_row, ends.astype(np.int32), counts)


class Sending:
    """Choice of the physical slots that serve the pairs of all ranks, by the rule of `fleet.dispatch`. Every
    rank must get the same result, so every rank calls `slots` once for every layer of every step."""

    def __init__(self, placement: Placement, cover: bool) -> None:
        """cover: choose the replicas of a token's experts together, so that few ranks are reached."""
        self._cover = cover
        # The ranks of this engine meet in a folder, so they are on one machine.
        self._chooser = Chooser(placement, range(placement.ranks), np.zeros(placement.ranks, np.intp))
        self._experts = placement.experts
        self.first = self._chooser.table
        """int64 [layers, ranks * experts]: the first slot that may serve an expert. With one rank, the only
        one."""
        self._turns = np.zeros(self._chooser.table.shape, np.int64)
        """[layers, ranks * experts]: round-robin counters, for layers with a choice of replicas."""

    def slots(self, layer: int, home: IntArray, experts: IntArray) -> IntArray:
        """Choose slots, int64 [T, k], for tokens with home ranks [T] and experts [T, k]."""
        keys = home[:, None] * self._experts + experts
        if self._chooser.plain[layer]:
            return np.asarray(self._chooser.table[layer][keys])
        pairs, turns = keys.reshape(-1), self._turns[layer]
        found = (
            self._chooser.cover(layer, keys, turns)
            if self._cover
            else self._chooser.choose(layer, pairs, turns).reshape(keys.shape)
        )
        turns += np.bincount(pairs, minlength=len(turns))
        return found


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Work of a rank for one layer."""

    rows: torch.Tensor
    """[rows, H], sorted by (physical slot of this rank, source rank, token), with groups padded."""
    ends: torch.Tensor
    """int32 [slots]: end of each slot's rows, padding included."""
    counts: IntArray
    """int64 [slots]: real rows of each slot."""
    handle: "Handle"


@dataclass(frozen=True, slots=True)
class Handle:
    """State that `combine` needs from its `dispatch`. Opaque to callers."""

    call: int
    row_of_pair: IntArray
    """int64 [pairs computed here]: their rows, ordered by source, then by (token, k)."""
    to_sources: tuple[int, ...] = ()
    """Pairs computed here for each source rank."""
    back_order: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [T * k]: position of each own pair's result among the returned rows."""
    from_ranks: tuple[int, ...] = ()
    """Own pairs computed by each rank."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Work of a rank for one sharded layer."""

    rows: torch.Tensor
    """[rows, H], sorted by (expert, source rank, token), with groups padded."""
    ends: torch.Tensor
    """int32 [experts]: end of each expert's rows, padding included."""
    handle: "GatherHandle"


@dataclass(frozen=True, slots=True)
class GatherHandle:
    """State that `reduce` needs from its `gather`. Opaque to callers."""

    call: int
    row_of_pair: IntArray
    """int64 [all tokens * k]: the row of each pair, tokens ordered by rank."""
    weights: torch.Tensor
    """fp32 [all tokens, k]."""

    def weighted(self, results: torch.Tensor) -> torch.Tensor:
        """Add up the results [rows, H] of each token's pairs: fp32 [all tokens, H]."""
        return weighted_sum(results, self.row_of_pair, self.weights)


class PartExchange(Protocol):
    """Exchange of one rank in sharded layers. All ranks make the same calls for every layer of a step."""

    def gather(self, x: torch.Tensor, experts: NDArray[Any], weights: torch.Tensor) -> Gathered:
        """Bring x [T, H], experts, integer [T, k], and weights, fp32 [T, k], of all ranks to this rank, and
        return its work. CapacityError, ExpertIndexError."""
        ...

    def reduce(self, results: torch.Tensor, handle: GatherHandle) -> torch.Tensor:
        """Return the sums over all ranks, fp32 [T, H], of their weighted results [rows, H] of the gathered
        rows. HandleError."""
        ...


class Dispatch(PartExchange, Protocol):
    """Exchange of one rank. All ranks make the same calls for every layer of a step, even without tokens."""

    @property
    def served_by(self) -> Sequence[IntArray]:
        """int64 [all tokens, k] for each layer dispatched in this step so far, tokens ordered by rank: the
        rank that serves each pair. Sharded layers are left out. The arrays are never modified. Empty with one
        rank."""
        ...

    def begin_step(self, tokens: int, tokens_by_rank: Sequence[int] | None) -> None:
        """Set the tokens of this rank in the step, and those of each rank (None: the ranks exchange them).
        CapacityError when there are too many."""
        ...

    def dispatch(self, layer: int, x: torch.Tensor, experts: NDArray[Any]) -> Dispatched:
        """Send x [T, H] to experts, integer [T, k], and return the work of this rank. CapacityError,
        ExpertIndexError."""
        ...

    def combine(self, results: torch.Tensor, weights: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return the weighted sums, fp32 [T, H], of results [rows, H] of the dispatched rows with weights
        fp32 [T, k]. HandleError."""
        ...

    def sending(self, placement: Placement) -> Sending:
        """Prepare the slot choice for another placement with the same ranks, experts and slots. Thread-safe;
        changes nothing."""
        ...

    def adopt(self, sending: Sending) -> None:
        """Use this slot choice from now on. All ranks call it between the same two steps."""
        ...

    def slow_links(self, seconds: float) -> None:
        """Emulate slow links between machines: delay each transfer of a token of this rank to another rank
        and back by this time. Call it between two steps."""
        ...


def sent_away(served_by: IntArray, rank: int) -> int:
    """Count transfers of this rank's tokens to other ranks, once per token and rank that serves any of its
    experts. served_by: int64 [T, k]."""
    others = np.sort(np.where(served_by == rank, -1, served_by), axis=1)
    return int((others[:, :1] >= 0).sum() + ((others[:, 1:] != others[:, :-1]) & (others[:, 1:] >= 0)).sum())


class Calls:
    """Counter of a rank's exchanges. It checks that only the latest one is completed, at most once."""

    def __init__(self) -> None:
        self._made = 0
        self._open = False

    def next(self) -> int:
        self._made += 1
        self._open = True
        return self._made

    def close(self, handle: Handle | GatherHandle) -> None:
        if not self._open or handle.call != self._made:
            raise HandleError(
                f"dispatch: handle {handle.call} is used up or not the latest ({self._made}); combine or"
                " reduce each once, before the next"
            )
        self._open = False


def check_experts(experts: NDArray[Any], count: int) -> None:
    """Raise ExpertIndexError unless all of experts [T, k] are numbers of the `count` experts of a layer."""
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < count:
        token, at = np.argwhere((experts < 0) | (experts >= count))[0]
        raise ExpertIndexError(
            f"dispatch: token {token} names expert {experts[token, at]}; a layer has experts 0 to {count - 1}"
        )


def _check_step(tokens: int, rank: int, tokens_by_rank: Sequence[int], ranks: int, max_tokens: int) -> None:
    if len(tokens_by_rank) != ranks or tokens_by_rank[rank] != tokens:
        raise DispatchError(
            f"dispatch: rank {rank} of {ranks} brings {tokens} tokens, but the step headers say"
            f" {list(tokens_by_rank)}"
        )
    if max(tokens_by_rank) > max_tokens:
        raise CapacityError(
            f"dispatch: {max(tokens_by_rank)} tokens of one rank in a step, {max_tokens} are allowed; raise"
            " max_tokens or send smaller chunks"
        )


def sorted_by_expert(
    x: torch.Tensor, experts: NDArray[Any], weights: torch.Tensor, count: int, min_rows: int, call: int
) -> Gathered:
    """Sort x [T, H] by experts [T, k], with weights fp32 [T, k]. count: experts of a layer. min_rows: of a
    group. call: its number, for the handle."""
    groups = group_by_slot(experts.reshape(-1), count, min_rows)
    rows = x.index_select(0, torch.from_numpy(groups.pair_of_row // experts.shape[1]))
    return Gathered(rows, torch.from_numpy(groups.ends), GatherHandle(call, groups.row_of_pair, weights))


class LocalDispatch:
    """Dispatch of an engine with one rank. All experts are local."""

    def __init__(self, placement: Placement, max_tokens: int, *, group_rows: int = GROUP_ROWS) -> None:
        """group_rows: minimum rows of a non-empty group."""
        if placement.ranks != 1:
            raise ValueError(
                f"dispatch: {placement!r} needs {placement.ranks} ranks; local dispatch is for one"
            )
        self._experts = placement.experts
        self._table = self.sending(placement).first
        self._slots = placement.slots_per_rank
        self._max_tokens = max_tokens
        self._group_rows = group_rows
        self._calls = Calls()
        self.served_by: Sequence[IntArray] = ()

    def begin_step(self, tokens: int, tokens_by_rank: Sequence[int] | None) -> None:
        _check_step(tokens, 0, (tokens,) if tokens_by_rank is None else tokens_by_rank, 1, self._max_tokens)

    def dispatch(self, layer: int, x: torch.Tensor, experts: NDArray[Any]) -> Dispatched:
        check_experts(experts, self._experts)
        groups = group_by_slot(self._table[layer][experts.reshape(-1)], self._slots, self._group_rows)
        rows = x.index_select(0, torch.from_numpy(groups.pair_of_row // experts.shape[1]))
        return Dispatched(
            rows, torch.from_numpy(groups.ends), groups.counts, Handle(self._calls.next(), groups.row_of_pair)
        )

    def combine(self, results: torch.Tensor, weights: torch.Tensor, handle: Handle) -> torch.Tensor:
        self._calls.close(handle)
        return weighted_sum(results, handle.row_of_pair, weights)

    def gather(self, x: torch.Tensor, experts: NDArray[Any], weights: torch.Tensor) -> Gathered:
        check_experts(experts, self._experts)
        return sorted_by_expert(x, experts, weights, self._experts, self._group_rows, self._calls.next())

    def reduce(self, results: torch.Tensor, handle: GatherHandle) -> torch.Tensor:
        self._calls.close(handle)
        return handle.weighted(results)

    def sending(self, placement: Placement) -> Sending:
        return Sending(placement, cover=False)  # With one rank, every expert has one slot.

    def adopt(self, sending: Sending) -> None:
        self._table = sending.first

    def slow_links(self, seconds: float) -> None:
        """Do nothing: tokens never leave the rank."""


class GlooDispatch:
    """Dispatch over a process group: two collectives per layer for small steps and in sharded layers, three
    in whole layers of larger steps.

    Every rank learns the experts of every token (IDs are small). So no counts are exchanged: both ends of
    every transfer derive its size. In small steps, all activations go to all ranks along with the IDs. In
    larger steps, a token's activations go once to each rank that holds one of its experts.
    """

    def __init__(
        self,
        group: RankGroup,
        placement: Placement,
        max_tokens: int,
        *,
        cover: bool = False,
        small_gather_bytes: int = SMALL_GATHER_BYTES,
        group_rows: int = GROUP_ROWS,
    ) -> None:
        """cover: choose replicas so that a token is sent to few ranks (`fleet.dispatch.COVER`). The same on
        every rank. group_rows: minimum rows of a non-empty group."""
        if placement.ranks != group.ranks:
            raise ValueError(f"dispatch: {placement!r} does not fit a group of {group.ranks} ranks")
        self._group = group
        self._slots = placement.slots_per_rank
        self._experts = placement.experts
        self._cover = cover
        self._sending = self.sending(placement)
        self._max_tokens = max_tokens
        self._small_gather_bytes = small_gather_bytes
        self._group_rows = group_rows
        self._calls = Calls()
        self._step = _Step.of((0,) * group.ranks)
        self._link_seconds = 0.0
        self.served_by: list[IntArray] = []

    def begin_step(self, tokens: int, tokens_by_rank: Sequence[int] | None) -> None:
        if tokens_by_rank is None:
            tokens_by_rank = self._group.all_gather(torch.tensor([tokens])).view(-1).tolist()
        _check_step(tokens, self._group.rank, tokens_by_rank, self._group.ranks, self._max_tokens)
        self._step, self.served_by = _Step.of(tuple(tokens_by_rank)), []

    def dispatch(self, layer: int, x: torch.Tensor, experts: NDArray[Any]) -> Dispatched:
        check_experts(experts, self._experts)
        small = self._step.max_tokens * x.shape[1] * x.element_size() <= self._small_gather_bytes
        everyones_x, ids, _ = self._everyones(x if small else x[:, :0], experts)
        slots = self._sending.slots(layer, self._step.home, ids)
        ranks = slots // self._slots
        self.served_by.append(ranks)
        if self._link_seconds:
            self._group.wait(
                self._link_seconds * sent_away(ranks[self._step.home == self._group.rank], self._group.rank)
            )
        pairs = np.flatnonzero(ranks == self._group.rank)
        tokens = pairs // ids.shape[1]
        if not small:
            everyones_x, tokens = self._fetch(x, ranks, tokens)
        own_slots = slots.reshape(-1)[pairs] - self._group.rank * self._slots
        groups = group_by_slot(own_slots, self._slots, self._group_rows)
        rows = everyones_x.index_select(0, torch.from_numpy(tokens[groups.pair_of_row]))
        return Dispatched(
            rows, torch.from_numpy(groups.ends), groups.counts, self._handle(ranks, pairs, groups)
        )

    def combine(self, results: torch.Tensor, weights: torch.Tensor, handle: Handle) -> torch.Tensor:
        self._calls.close(handle)
        outgoing = results.index_select(0, torch.from_numpy(handle.row_of_pair))
        back = self._group.all_to_all(outgoing, handle.to_sources, handle.from_ranks)
        return weighted_sum(back, handle.back_order, weights)

    def gather(self, x: torch.Tensor, experts: NDArray[Any], weights: torch.Tensor) -> Gathered:
        check_experts(experts, self._experts)
        everyones_x, ids, everyones_weights = self._everyones(x, experts, weights)
        if self._link_seconds:
            self._group.wait(self._link_seconds * len(x) * (self._group.ranks - 1))
        call = self._calls.next()
        return sorted_by_expert(everyones_x, ids, everyones_weights, self._experts, self._group_rows, call)

    def reduce(self, results: torch.Tensor, handle: GatherHandle) -> torch.Tensor:
        self._calls.close(handle)
        own = self._step.tokens_by_rank[self._group.rank]
        sums = self._group.all_to_all(
            handle.weighted(results), self._step.tokens_by_rank, [own] * self._group.ranks
        ).view(self._group.ranks, own, results.shape[1])
        total = sums[0]
        for rank in range(1, self._group.ranks):
            total += sums[rank]
        return total

    def sending(self, placement: Placement) -> Sending:
        return Sending(placement, self._cover)

    def adopt(self, sending: Sending) -> None:
        self._sending = sending

    def slow_links(self, seconds: float) -> None:
        self._link_seconds = seconds

    def _everyones(
        self, x: torch.Tensor, experts: NDArray[Any], weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, IntArray, torch.Tensor]:
        """All ranks' activations [all tokens, H], expert IDs [all tokens, k] and weights fp32 [all tokens, k]
        (or none), tokens ordered by rank, with one collective of bytes."""
        count, k = experts.shape
        ids = torch.from_numpy(experts.astype(np.uint16).view(np.uint8).reshape(count, 2 * k))
        of_weights = ids[:, :0] if weights is None else bytes_of(weights)
        mine = torch.cat([bytes_of(x), of_weights, ids], dim=1)
        everyone = self._group.all_to_all(
            mine.repeat(self._group.ranks, 1), [count] * self._group.ranks, self._step.tokens_by_rank
        )
        width = x.shape[1] * x.element_size()
        between = width + of_weights.shape[1]
        return (
            _columns(everyone, 0, width, x.dtype),
            _columns(everyone, between, mine.shape[1], torch.uint16).numpy().astype(np.int64),
            _columns(everyone, width, between, torch.float32),
        )

    def _fetch(self, x: torch.Tensor, rank_of: IntArray, tokens: IntArray) -> tuple[torch.Tensor, IntArray]:
        """Fetch the activations of all `tokens` (indices into all ranks' tokens), each once. Return the rows,
        and the row of each of `tokens`."""
        needed = np.zeros(len(rank_of), bool)
        needed[tokens] = True
        receive = np.bincount(self._step.home[needed], minlength=self._group.ranks)
        own = rank_of[self._step.home == self._group.rank]
        rows_for = [np.flatnonzero((own == rank).any(axis=1)) for rank in range(self._group.ranks)]
        outgoing = x.index_select(0, torch.from_numpy(np.concatenate(rows_for)))
        rows = self._group.all_to_all(outgoing, [len(one) for one in rows_for], receive.tolist())
        return rows, (np.cumsum(needed) - 1)[tokens]

    def _handle(self, ranks: IntArray, pairs: IntArray, groups: Groups) -> Handle:
        k = ranks.shape[1]
        computed_for = np.bincount(self._step.home[pairs // k], minlength=self._group.ranks)
        own = ranks[self._step.home == self._group.rank].reshape(-1)
        # Results come back ordered by the rank that computed them. This is the inverse of that sort.
        back_order = np.empty(len(own), np.int64)
        back_order[np.argsort(own, kind="stable")] = np.arange(len(own))
        from_ranks = np.bincount(own, minlength=self._group.ranks)
        return Handle(
            self._calls.next(),
            groups.row_of_pair,
            tuple(computed_for.tolist()),
            back_order,
            tuple(from_ranks.tolist()),
        )


def _columns(rows: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy columns of a byte matrix as values of another type."""
    # A slice of a single row may keep a stride that does not fit the type.
    found = torch.empty((rows.shape[0], (end - begin) // dtype.itemsize), dtype=dtype)
    found.view(torch.uint8).copy_(rows[:, begin:end])
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """Layout of a step's tokens, from the step headers."""

    tokens_by_rank: tuple[int, ...]
    home: IntArray
    """int64 [all tokens]: the home rank of each token."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the busiest rank."""
        return max(self.tokens_by_rank)

    @classmethod
    def of(cls, tokens: tuple[int, ...]) -> "_Step":
        return cls(tokens, np.repeat(np.arange(len(tokens)), tokens))
