"""Replica selection: one rule for the engines that dispatch tokens and for the planner that predicts loads.
Pure.

A token of rank h is routed to expert e:

1. If h holds a replica, h serves the share `keep` of its own tokens itself.
2. The replicas on h's node take the rest of the node's tokens, each the share `near` (scaled down in
   proportion if they claim more than all).
3. All replicas, including h's own, take the tokens then left, from any rank, by `spill`.

Expected values are sums of products of these shares: demand per slot (`flows`, `loads`), from rank to rank
(`served_by`), per slot for one rank's tokens (`shares`), served by ranks of their own tokens (`own_part`),
sent onward (`onward`). Single tokens are sent such that every run of tokens approximates the shares as
closely as whole tokens allow (`Chooser.choose`).

Alternatively, an engine chooses for all k experts of a token together, so that the token is sent to fewer
ranks (`Chooser.cover`, `COVER`). The shares then define which replicas may serve, and decide wherever no
destination can be saved. The resulting load of a rank depends on which experts occur together in a token,
which per-expert demand does not show. All expected values here follow the shares. Under `COVER` actual loads
differ somewhat from them, and fewer ranks are reached than by independent choices.

vLLM chooses by the token's row in the step's batch (`ROW_HASH`, `row_copies`), wherever the token came from.
How evenly copies share then depends on the rows of a step (`row_shares`): a step of one token goes to the
first copies only. `as_dispatched` states this rule as a split, so that all expected values hold for it too.

`node` is int [ranks] everywhere: the machine of each rank, numbered from 0.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IntArray
from fleet.placement import EMPTY, FULL, Placement, Split

SPLIT, COVER, ROW_HASH = "split", "cover", "row-hash"
DispatchRule = Literal["split", "cover", "row-hash"]
"""Replica selection modes of an engine: each (token, k) pair by the shares alone, a token's pairs together to
reach few ranks, or (vLLM) by a hash of the token's row in the step's batch.
"""

_TURN = np.array(2_654_435_769, np.uint32)
"""Golden ratio as a fraction. Fractions here are in units of 2^-32 and wrap around. No number has more evenly
distributed multiples.
"""
_BY_EXPERT = np.array(3_242_174_889, np.uint32)
"""1 / plastic ratio: starting points of experts. It is unrelated to the golden ratio, so that experts with
equal shares do not choose in step.
"""
_BY_HOME = 1_779_033_703
"""sqrt(2) - 1: starting points of ranks, so that single tokens of several ranks do not all choose the same
replica.
"""
_LAST = 0xFFFF_FFFF


_ROW = 2_654_435_769
"""Multiplier of vLLM's hash of a row, modulo 2^32 (Knuth's multiplicative hash)."""
MANY_ROWS = 1 << 13
"""Rows from which copies count as sharing as in the long run: none is further than .5 % of the pairs from an
even share."""


def row_copies(rows: NDArray[Any], copies: NDArray[Any] | int) -> IntArray:
    """Return which of its expert's copies serves each (token, k) pair under `ROW_HASH`: int64, from 0.

    rows: row of the token in the batch over which the engine selects experts. copies: of the pair's expert.
    Copies are numbered by their slots, the lowest first; a rank that holds an expert twice has two. Row 0
    always goes to the first copy. vLLM 0.32: `fused_moe/router/base_router.py`.
    """
    return np.asarray((np.asarray(rows, np.int64) * _ROW & _LAST) % copies, np.int64)


def row_shares(copies: int, rows: NDArray[Any] | int) -> FloatArray:
    """Return the expected share of an expert's pairs that each of its copies serves under `ROW_HASH`: float64
    [copies].

    rows: rows of a step, or of several steps [n], each with its weight in tokens. A pair is at any row of its
    step with equal probability. ValueError if there is a step without a row.
    """
    steps = np.minimum(np.atleast_1d(np.asarray(rows, np.int64)), MANY_ROWS)
    if not len(steps) or steps.min() < 1:
        raise ValueError(f"row hash: every step must have at least one row, not {rows}")
    # A row counts once for every step that has it.
    times = np.cumsum(np.bincount(steps)[::-1])[::-1][1:]
    counts = np.bincount(row_copies(np.arange(len(times)), copies), times, copies)
    return np.asarray(counts / times.sum())


def as_dispatched(placement: Placement, rule: str, rows: NDArray[Any] | int = MANY_ROWS) -> Placement:
    """Return the placement with the split by which an engine with this rule serves it.

    Under `ROW_HASH` no rank keeps its own tokens, and copies share by the rows of its steps (`row_shares`).
    Under the other rules it is the placement itself.
    """
    if rule != ROW_HASH:
        return placement
    held = LocalReplicas.of(placement)
    filled = placement.expert_of_slot != EMPTY
    layer, slot = np.nonzero(filled)
    place = layer * placement.experts + held.expert[layer, slot]
    nth, copies = _ordinals(place), np.bincount(place)[place]
    most = int(copies.max(initial=0)) + 1
    ends = np.zeros((most, most))
    for count in np.unique(copies).tolist():
        ends[count, 1 : count + 1] = np.rint(FULL * np.cumsum(row_shares(count, rows)))
    spill = np.zeros(filled.shape, np.uint16)
    spill[layer, slot] = ends[copies, nth + 1] - ends[copies, nth]
    nothing = np.zeros(filled.shape, np.uint16)
    return Placement(
        placement.expert_of_slot,
        experts=placement.experts,
        ranks=placement.ranks,
        epoch=placement.epoch,
        split=Split(nothing, spill, nothing),
        duplicates=True,
        sharded=placement.sharded,
        attention=placement.attention,
    )


def numbered(names: tuple[str, ...]) -> tuple[int, ...]:
    """Number the nodes of ranks by the names of their machines.

    Equal names get equal numbers, from 0 in order of first occurrence. Engines with the same distribution of
    ranks over machines therefore get equal results.
    """
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class LocalReplicas(NamedTuple):
    """Contents of a placement's slots, as index arrays that broadcast to [layers, slots]."""

    layer: NDArray[np.intp]
    """[layers, 1]"""
    expert: NDArray[np.intp]
    """[layers, slots]; 0 for empty slots, whose shares are all 0"""
    rank: NDArray[np.intp]
    """[1, slots]"""
    cell: NDArray[np.intp]
    """[layers, slots]: rank * experts + expert"""
    shape: tuple[int, int]
    """ranks, experts"""

    @classmethod
    def of(cls, placement: Placement) -> "LocalReplicas":
        layers, slots = placement.expert_of_slot.shape
        expert = np.maximum(placement.expert_of_slot, 0).astype(np.intp)
        rank = (np.arange(slots) // placement.slots_per_rank)[None]
        return cls(
            np.arange(layers)[:, None],
            expert,
            rank,
            rank * placement.experts + expert,
            (placement.ranks, placement.experts),
        )

    def by_rank(self, part: FloatArray, layer: int) -> FloatArray:
        """Sum values per slot [slots] of a layer by rank and expert: float64 [ranks, experts]."""
        ranks, experts = self.shape
        return np.asarray(np.bincount(self.cell[layer], part, ranks * experts), np.float64).reshape(
            self.shape
        )


class Flows(NamedTuple):
    """Served (token, k) pairs per slot, by origin: float64 [layers, slots] each. Their sum is the slot's
    load.
    """

    kept: FloatArray
    """of the holder's own requests, by `keep`"""
    near: FloatArray
    """of its node, by `near`"""
    spilt: FloatArray
    """of any rank, by `spill`"""

    @property
    def served(self) -> FloatArray:
        return np.asarray(self.kept + self.near + self.spilt)


def flows(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> Flows:
    """Return the expected pairs of each slot.

    demand: [ranks, layers, experts] pairs (any unit) by the rank of their requests.
    """
    ranks, layers, experts = demand.shape
    held = LocalReplicas.of(placement)
    keep, spill, claim = _parts(placement)
    kept = demand[held.rank, held.layer, held.expert] * keep
    if not placement.split.near.any():
        rest = np.maximum(demand.sum(axis=0, dtype=np.float64) - _sums(kept, held.expert, experts), 0.0)
        return Flows(kept, np.zeros_like(kept), spill * rest[held.layer, held.expert])
    nodes = int(node.max()) + 1
    left = np.zeros((layers, nodes, experts))
    for at in range(ranks):
        left[:, node[at]] += demand[at]
    place = node[held.rank] * experts + held.expert
    flat = np.maximum(left.reshape(layers, -1) - _sums(kept, place, nodes * experts), 0.0)
    claimed = _sums(claim, place, nodes * experts)
    taken = flat / np.maximum(claimed, 1.0)
    near = claim * taken[held.layer, place]
    rest = np.maximum(flat - taken * claimed, 0.0).reshape(left.shape).sum(axis=1)
    return Flows(kept, near, spill * rest[held.layer, held.expert])


def loads(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> FloatArray:
    """Return the expected pairs that each rank serves: float64 [layers, ranks]. Arguments as in `flows`."""
    served = flows(placement, demand, node).served
    return np.asarray(served.reshape(placement.layers, placement.ranks, -1).sum(axis=2))


def served_by(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> FloatArray:
    """Return the expected pairs that each rank (first) serves of each rank's tokens (second): float64
    [layers, ranks, ranks].

    Arguments as in `flows`.
    """
    held, parts = LocalReplicas.of(placement), onward(placement, node)
    kept = demand[held.rank, held.layer, held.expert] * _parts(placement)[0]
    found = np.empty((placement.layers, placement.ranks, placement.ranks))
    for layer, here in enumerate(found):
        left = np.array(demand[:, layer], np.float64)
        np.subtract.at(left, (held.rank[0], held.expert[layer]), kept[layer])
        for at, part in enumerate(parts):
            homes = node == at if len(parts) > 1 else slice(None)
            here[:, homes] = held.by_rank(part[layer], layer) @ left[homes].T
    rank = np.arange(placement.ranks)
    found[:, rank, rank] += kept.reshape(placement.layers, placement.ranks, -1).sum(axis=2)
    return found


def onward(placement: Placement, node: NDArray[np.intp]) -> FloatArray:
    """Return the share that a slot takes of the tokens of a node that are not kept: float64 [nodes, layers,
    slots].

    The shares of an expert's slots sum to 1. [1, layers, slots] if the result is the same for all nodes.
    """
    _, spill, claim = _parts(placement)
    if not placement.split.near.any():
        return spill[None]
    held, experts = LocalReplicas.of(placement), placement.experts
    nodes, own = int(node.max()) + 1, node[held.rank]
    claimed = _sums(claim, own * experts + held.expert, nodes * experts).reshape(-1, nodes, experts)
    most = np.maximum(claimed, 1.0)
    rest = 1.0 - claimed / most
    return np.stack(
        [
            spill * rest[held.layer, at, held.expert]
            + claim * (own == at) / most[held.layer, at, held.expert]
            for at in range(nodes)
        ]
    )


def shares(placement: Placement, home: int, node: NDArray[np.intp]) -> FloatArray:
    """Return the share that a slot serves of the demand of rank `home` for the slot's expert: float64
    [layers, slots].

    The shares of an expert's slots sum to 1.
    """
    held, parts = LocalReplicas.of(placement), onward(placement, node)
    own = slice(home * placement.slots_per_rank, (home + 1) * placement.slots_per_rank)
    keep = _parts(placement)[0][:, own]
    kept = _sums(keep, held.expert[:, own], placement.experts)
    found = parts[min(int(node[home]), len(parts) - 1)] * (1.0 - kept)[held.layer, held.expert]
    found[:, own] += keep
    return np.asarray(found)


def own_part(placement: Placement, node: NDArray[np.intp]) -> FloatArray:
    """Return the share that a slot serves of its own rank's demand for its expert: float64 [layers, slots].

    It consists of the kept tokens and of the part of the rest that returns to the slot.
    """
    keep = np.asarray(placement.split.keep / FULL)
    if placement.keeps_all:
        return keep
    parts, rank = onward(placement, node), LocalReplicas.of(placement).rank[0]
    back = parts[np.minimum(node[rank], len(parts) - 1), :, np.arange(len(rank))].T
    return np.asarray(keep + (1.0 - keep) * back)


class Chooser:
    """Dispatches the tokens of some ranks in the whole layers of one placement, one by one.

    The slots that may serve an expert divide a circle in proportion to their `shares`. A rank's tokens for
    this expert step around the circle by the golden ratio. Of N consecutive steps each slot gets its share
    within 3 + 3.6 ln N, usually within 1 or 2 (Kuipers and Niederreiter, Uniform Distribution of Sequences,
    theorem 2.3.4).
    """

    def __init__(self, placement: Placement, homes: Sequence[int], node: NDArray[np.intp]) -> None:
        slots, ends = _circles(placement, np.stack([shares(placement, home, node) for home in homes]))
        several: NDArray[np.bool_] = np.any(ends[:, :1] < _LAST, axis=1)  # no ends: only one slot
        self.table: IntArray = np.ascontiguousarray(slots[:, :, 0])
        """int64 [layers, homes * experts]: the first slot that may serve an expert; in `plain` layers the
        only one. -1 in sharded layers, where no slot serves an expert
        """
        self.table[list(placement.sharded)] = EMPTY
        self.plain: tuple[bool, ...] = tuple(not any(one) for one in several.tolist())
        """per layer: True if every expert has only one possible slot for each home"""
        self._several = several
        self._slots = slots
        self._ends = ends
        # numpy radix-sorts short integers, which is faster
        self._sorted = np.int16 if several.shape[1] < 1 << 15 else np.int64
        self._homes = np.array(homes, np.int64)
        self._experts, self._per_rank, self._ranks = (
            placement.experts,
            placement.slots_per_rank,
            placement.ranks,
        )
        begin = np.array([home * _BY_HOME & _LAST for home in homes], np.uint32)
        self._phase = (begin[:, None] + np.arange(placement.experts, dtype=np.uint32) * _BY_EXPERT).ravel()

    def choose(self, layer: int, experts: NDArray[Any], turn: int | NDArray[np.int64]) -> IntArray:
        """Choose the slots of one step's pairs: int64 [n].

        experts: int [n], their experts; with several homes, the experts of home i are offset by i * experts.
        turn: int64 [homes * experts], the number of earlier pairs of each. A single number for all, e.g. the
        step count, is sufficient for callers that do not count: each step is then as close to the shares as
        possible, and many steps together a little less.
        """
        found: IntArray = self.table[layer][experts]
        if self.plain[layer]:
            return found
        at = np.flatnonzero(self._several[layer][experts])
        experts = experts[at]
        before = turn[experts] if isinstance(turn, np.ndarray) else turn & _LAST
        point = (
            self._phase[experts]
            + (_ordinals(experts.astype(self._sorted)) + before).astype(np.uint32) * _TURN
        )
        nth = (point > self._ends[layer].take(experts, axis=1)).sum(axis=0)
        found[at] = self._slots[layer][experts, nth]
        return found

    def cover(self, layer: int, experts: NDArray[Any], turn: int | NDArray[np.int64]) -> IntArray:
        """Choose the slots of n whole tokens' pairs such that each token reaches few ranks besides its own:
        int64 [n, k].

        A token never reaches more ranks than by `choose`, whose choices stand where no destination is saved.
        experts: int [n, k]; a token's experts belong to one home. turn: as in `choose`.

        Greedy set cover. It starts with the token's own rank and the ranks that are the only holders of one
        of its experts. The next rank is the one that holds most of the remaining experts. Ties go to the rank
        that `choose` takes for the token's first expert, or the second and so on, so that equal ranks get
        their shares; then to the lowest rank. The result is minimal if at most three experts remain after the
        start. Every chosen slot has a share of its home's tokens.
        """
        found = self.choose(layer, experts.reshape(-1), turn).reshape(experts.shape)
        if self.plain[layer]:
            return found
        at = np.flatnonzero(self._several[layer][experts].any(axis=1))
        found[at] = self._covered(layer, experts[at], found[at])
        return found

    def _covered(self, layer: int, experts: NDArray[Any], split: IntArray) -> IntArray:
        """Implement `cover`. split: int64 [n, k], the choices of `choose`."""
        slots = self._slots[layer][experts]
        rank, home, chosen = (
            slots // self._per_rank,
            self._homes[experts[:, 0] // self._experts],
            split // self._per_rank,
        )
        can = np.zeros((*experts.shape, self._ranks), np.bool_)
        np.put_along_axis(can, rank, True, axis=2)
        opened = _opened(can, home, chosen)
        # Among the opened ranks: first by the shares, then the token's own rank, then the next one around the
        # circle.
        most = slots.shape[2]
        ahead = 2 * ((np.arange(most) - (slots == split[:, :, None]).argmax(axis=2)[:, :, None]) % most)
        ahead = np.where((rank == home[:, None, None]) & (ahead > 0), 1, ahead)
        ahead[~np.take_along_axis(opened[:, None], rank, axis=2)] = 2 * most
        found = np.take_along_axis(slots, ahead.argmin(axis=2)[:, :, None], axis=2)[:, :, 0]
        fewer = reached(found // self._per_rank, home) < reached(chosen, home)
        return np.where(fewer[:, None], found, split)


def reached(rank: NDArray[Any], home: NDArray[Any]) -> NDArray[np.int64]:
    """Count the ranks other than its own to which each token goes: int64 [n]. rank: int [n, k], of its pairs;
    home: int [n].
    """
    ordered = np.sort(np.concatenate([rank, home[:, None]], axis=1), axis=1)
    return np.asarray((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1), np.int64)


def _opened(can: NDArray[np.bool_], home: IntArray, chosen: IntArray) -> NDArray[np.bool_]:
    """Return ranks that together can serve each token: bool [n, ranks].

    can: bool [n, k, ranks]. home: [n]. chosen: [n, k], preferred ranks, in descending order of preference.
    """
    tokens, k, ranks = can.shape
    opened = np.asarray((can & (can.sum(axis=2) == 1)[:, :, None]).any(axis=1))
    opened[np.arange(tokens), home] = True
    preferred = np.zeros((tokens, ranks), np.int64)
    for nth in reversed(range(k)):
        preferred[np.arange(tokens), chosen[:, nth]] = k - nth
    left = ~(can & opened[:, None]).any(axis=2)
    while len(at := np.flatnonzero(left.any(axis=1))):
        gain = (can[at] & left[at][:, :, None]).sum(axis=1)
        best = (gain * (k + 1) + preferred[at]).argmax(axis=1)
        opened[at, best] = True
        left[at] &= ~can[at, :, best]
    return opened


def _circles(placement: Placement, part: FloatArray) -> tuple[IntArray, NDArray[np.uint32]]:
    """Return the slots with a share of each expert, and their end points on the circle.

    part: [homes, layers, slots]. Slots: int64 [layers, homes * experts, m], ascending, padded with the first
    one. End points of all but the last slot: [layers, m - 1, homes * experts].
    """
    layers, across = placement.layers, len(part) * placement.experts
    home, layer, slot = np.nonzero(part > 0.0)
    place = layer * across + home * placement.experts + placement.expert_of_slot[layer, slot]
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=layers * across)
    nth = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.zeros((layers * across, max(1, int(counts.max()))), np.int64)
    length = np.zeros(slots.shape)
    slots[place[order], nth] = slot[order]
    length[place[order], nth] = part[home, layer, slot][order]
    slots = np.where(np.arange(slots.shape[1]) < counts[:, None], slots, slots[:, :1])
    ends = np.clip(np.rint(length.cumsum(axis=1) * 2.0**32) - 1.0, 0.0, _LAST).astype(np.uint32)
    ends[np.arange(ends.shape[1]) >= counts[:, None] - 1] = _LAST
    shape = (layers, across, slots.shape[1])
    return slots.reshape(shape), np.ascontiguousarray(ends.reshape(shape)[:, :, :-1].transpose(0, 2, 1))


def _ordinals(values: NDArray[Any]) -> NDArray[np.int64]:
    """Count the earlier occurrences of each value, in order: int64 [n]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(values) else order
    nth = np.arange(len(values))
    found = np.empty(len(values), np.int64)
    found[order] = nth - np.repeat(begins, np.diff(begins, append=len(values)))
    return found


def _parts(placement: Placement) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return keep, spill, near as shares: float64 [layers, slots]."""
    keep, spill, near = (np.asarray(part, np.float64) / FULL for part in placement.split)
    return keep, spill, near


def _sums(values: FloatArray, place: NDArray[Any], places: int) -> FloatArray:
    """Sum values [layers, slots] by place [layers, slots]: float64 [layers, places]."""
    layers = len(values)
    index = (np.arange(layers)[:, None] * places + place).ravel()
    return np.asarray(np.bincount(index, values.ravel(), layers * places).reshape(layers, places))
