"""Which replica serves a token: one rule, for whoever sends tokens and for whoever foretells where they go. Pure.

A token of rank h wants expert e:

1. h holds a replica: it serves the part `keep` of its own tokens itself.
2. What is left of the tokens of h's node goes to the replicas of that node, each the part `near` (in proportion where they claim more than all).
3. What is left then, from wherever, goes to the replicas by `spill`, h's own among them.

All three are shares. What is expected is sums of products: by slot of all demand (`flows`, `loads`), from rank to rank (`served_by`), by slot
of one rank's tokens (`shares`), of what ranks serve of their own (`own_part`), of what they send on (`onward`). Single tokens are sent
such that any run of them comes as near to the shares as whole tokens can (`Chooser.choose`).

An engine may choose for all k experts of a token at once instead, so that the token has to be sent to fewer ranks (`Chooser.cover`,
`COVER`). The shares then say which replicas may serve, and decide wherever no destination is saved; what ranks serve in the end depends on
which experts tokens want together, which demand by expert does not tell. Everything that is expected here is about the shares: under
`COVER` loads differ from it somewhat, and fewer ranks are reached than would be by independent choices.

`node` is int [ranks] everywhere: the machine of each rank, numbered from 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import FULL, Placement

Table = NDArray[np.float64]
Slots = NDArray[np.int64]

SPLIT, COVER = "split", "cover"
DISPATCHES = (SPLIT, COVER)
"""How an engine chooses among replicas: each (token, k) pair by the shares alone, or a token's pairs together such that few ranks are reached."""

_TURN = np.array(2_654_435_769, np.uint32)
"""Fractions are in units of 2^-32 here and wrap around. This one is of the golden ratio: its multiples lie as evenly as those of any number."""
_BY_EXPERT = np.array(3_242_174_889, np.uint32)
"""1 / plastic ratio: where experts begin. It has nothing to do with the golden ratio, so that experts of equal shares do not agree"""
_BY_HOME = 1_779_033_703
"""sqrt(2) - 1: where ranks begin, so that the single tokens of several do not go the same way"""
_LAST = 0xFFFF_FFFF


def numbered(names: tuple[str, ...]) -> tuple[int, ...]:
    """The nodes of ranks, by the names of their machines. Equal names get equal numbers, from 0 in the order in which they come: engines
    whose ranks are spread alike are alike."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class LocalReplicas(NamedTuple):
    """What is in the slots of a placement, shaped such that arrays [layers, slots] may be made with them."""

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
        return cls(np.arange(layers)[:, None], expert, rank, rank * placement.experts + expert, (placement.ranks, placement.experts))

    def by_rank(self, part: Table, layer: int) -> Table:
        """float64 [ranks, experts] of what the slots [slots] of a layer have."""
        ranks, experts = self.shape
        return np.asarray(np.bincount(self.cell[layer], part, ranks * experts), np.float64).reshape(self.shape)


class Flows(NamedTuple):
    """Where an engine's (token, k) pairs are served, per slot: float64 [layers, slots] each; their sum is the slot's load."""

    kept: Table
    """from the holder's own requests, by `keep`"""
    near: Table
    """from its node, by `near`"""
    spilt: Table
    """from anywhere, by `spill`"""

    @property
    def served(self) -> Table:
        return np.asarray(self.kept + self.near + self.spilt)


def flows(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> Flows:
    """Expected pairs of each slot. demand: [ranks, layers, experts] pairs (any unit) by the rank their requests live on."""
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


def loads(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> Table:
    """float64 [layers, ranks]: expected pairs that each rank serves. Arguments as of `flows`."""
    served = flows(placement, demand, node).served
    return np.asarray(served.reshape(placement.layers, placement.ranks, -1).sum(axis=2))


def served_by(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> Table:
    """float64 [layers, ranks, ranks]: expected pairs that each rank (first) serves of each rank's tokens (second). Arguments as of `flows`."""
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


def onward(placement: Placement, node: NDArray[np.intp]) -> Table:
    """float64 [nodes, layers, slots]: the part that a slot takes of those tokens of a node that are not kept; over an expert's slots they add up to 1.

    [1, layers, slots] where it is the same for all nodes.
    """
    _, spill, claim = _parts(placement)
    if not placement.split.near.any():
        return spill[None]
    held, experts = LocalReplicas.of(placement), placement.experts
    nodes, own = int(node.max()) + 1, node[held.rank]
    claimed = _sums(claim, own * experts + held.expert, nodes * experts).reshape(-1, nodes, experts)
    most = np.maximum(claimed, 1.0)
    rest = 1.0 - claimed / most
    return np.stack([spill * rest[held.layer, at, held.expert] + claim * (own == at) / most[held.layer, at, held.expert] for at in range(nodes)])


def shares(placement: Placement, home: int, node: NDArray[np.intp]) -> Table:
    """float64 [layers, slots]: the part of what rank `home` wants of a slot's expert that this slot serves; over an expert's slots they add up to 1."""
    held, parts = LocalReplicas.of(placement), onward(placement, node)
    own = slice(home * placement.slots_per_rank, (home + 1) * placement.slots_per_rank)
    keep = _parts(placement)[0][:, own]
    kept = _sums(keep, held.expert[:, own], placement.experts)
    found = parts[min(int(node[home]), len(parts) - 1)] * (1.0 - kept)[held.layer, held.expert]
    found[:, own] += keep
    return np.asarray(found)


def own_part(placement: Placement, node: NDArray[np.intp]) -> Table:
    """float64 [layers, slots]: the part of what its own rank wants of a slot's expert that the slot serves: what it keeps, and what of the rest comes
    back to it."""
    keep = np.asarray(placement.split.keep / FULL)
    if placement.keeps_all:
        return keep
    parts, rank = onward(placement, node), LocalReplicas.of(placement).rank[0]
    back = parts[np.minimum(node[rank], len(parts) - 1), :, np.arange(len(rank))].T
    return np.asarray(keep + (1.0 - keep) * back)


class Chooser:
    """Sends the tokens of some ranks of one placement, one by one.

    The slots that may serve an expert divide a circle among themselves by their `shares`; a rank's tokens of this expert step around it by the
    golden ratio. Of N steps in a row each slot gets its share but for 3 + 3.6 ln N at most, and 1 or 2 as a rule (Kuipers and Niederreiter,
    Uniform Distribution of Sequences, theorem 2.3.4).
    """

    def __init__(self, placement: Placement, homes: Sequence[int], node: NDArray[np.intp]) -> None:
        slots, ends = _circles(placement, np.stack([shares(placement, home, node) for home in homes]))
        several: NDArray[np.bool_] = np.any(ends[:, :1] < _LAST, axis=1)  # without ends: nowhere
        self.table: Slots = np.ascontiguousarray(slots[:, :, 0])
        """int64 [layers, homes * experts]: the first slot that may serve an expert; the only one in `plain` layers"""
        self.plain: tuple[bool, ...] = tuple(not any(one) for one in several.tolist())
        """of each layer, whether every expert has but one possible slot for each home"""
        self._several = several
        self._slots = slots
        self._ends = ends
        self._sorted = np.int16 if several.shape[1] < 1 << 15 else np.int64  # numpy sorts short integers by their digits, which is faster
        self._homes = np.array(homes, np.int64)
        self._experts, self._per_rank, self._ranks = placement.experts, placement.slots_per_rank, placement.ranks
        begin = np.array([home * _BY_HOME & _LAST for home in homes], np.uint32)
        self._phase = (begin[:, None] + np.arange(placement.experts, dtype=np.uint32) * _BY_EXPERT).ravel()

    def choose(self, layer: int, wanted: NDArray[Any], turn: int | NDArray[np.int64]) -> Slots:
        """int64 [n]: the slots of the pairs of one step. wanted: int [n], their experts; of several homes, the n-th home's from n * experts on.

        turn: int64 [homes * experts], how many pairs went before of each. One number for all, say of steps, will do where nobody counts: a
        step's pairs then still are as near to the shares as can be, many steps a little less.
        """
        found: Slots = self.table[layer][wanted]
        if self.plain[layer]:
            return found
        at = np.flatnonzero(self._several[layer][wanted])
        wanted = wanted[at]
        before = turn[wanted] if isinstance(turn, np.ndarray) else turn & _LAST
        point = self._phase[wanted] + (_ordinals(wanted.astype(self._sorted)) + before).astype(np.uint32) * _TURN
        nth = (point > self._ends[layer].take(wanted, axis=1)).sum(axis=0)
        found[at] = self._slots[layer][wanted, nth]
        return found

    def cover(self, layer: int, wanted: NDArray[Any], turn: int | NDArray[np.int64]) -> Slots:
        """int64 [n, k]: the slots of the pairs of n whole tokens, such that each token reaches few ranks besides its own: never more than by
        `choose`, whose choices stand where nothing is saved. wanted: int [n, k]; a token's experts are of one home. turn: as of `choose`.

        Greedy set cover, from the token's own rank and those that alone hold one of its experts: next comes the rank that holds most of what
        is left; of several, the one that `choose` takes for the first of the token's experts, or the second and so on, so that equals take
        their parts; then the lowest. It is the least number wherever no more than three experts are left to it. Every slot chosen has a
        share of its home's tokens.
        """
        found = self.choose(layer, wanted.reshape(-1), turn).reshape(wanted.shape)
        if self.plain[layer]:
            return found
        at = np.flatnonzero(self._several[layer][wanted].any(axis=1))
        found[at] = self._covered(layer, wanted[at], found[at])
        return found

    def _covered(self, layer: int, wanted: NDArray[Any], split: Slots) -> Slots:
        """As `cover`. split: int64 [n, k], the choices of `choose`."""
        slots = self._slots[layer][wanted]
        rank, home, chosen = slots // self._per_rank, self._homes[wanted[:, 0] // self._experts], split // self._per_rank
        can = np.zeros((*wanted.shape, self._ranks), np.bool_)
        np.put_along_axis(can, rank, True, axis=2)
        opened = _opened(can, home, chosen)
        # of the ranks that are opened: by the shares; else the token's own; else the next around the circle
        most = slots.shape[2]
        ahead = 2 * ((np.arange(most) - (slots == split[:, :, None]).argmax(axis=2)[:, :, None]) % most)
        ahead = np.where((rank == home[:, None, None]) & (ahead > 0), 1, ahead)
        ahead[~np.take_along_axis(opened[:, None], rank, axis=2)] = 2 * most
        found = np.take_along_axis(slots, ahead.argmin(axis=2)[:, :, None], axis=2)[:, :, 0]
        fewer = reached(found // self._per_rank, home) < reached(chosen, home)
        return np.where(fewer[:, None], found, split)


def reached(rank: NDArray[Any], home: NDArray[Any]) -> NDArray[np.int64]:
    """int64 [n]: how many ranks other than its own each token goes to. rank: int [n, k], of its pairs; home: int [n]."""
    ordered = np.sort(np.concatenate([rank, home[:, None]], axis=1), axis=1)
    return np.asarray((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1), np.int64)


def _opened(can: NDArray[np.bool_], home: Slots, chosen: Slots) -> NDArray[np.bool_]:
    """bool [n, ranks]: ranks that together can serve each token. can: bool [n, k, ranks]; home: [n]; chosen: [n, k], ranks to prefer, the first
    most."""
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


def _circles(placement: Placement, part: Table) -> tuple[Slots, NDArray[np.uint32]]:
    """The slots that have a part [homes, layers, slots] in each expert, ascending: int64 [layers, homes * experts, m], filled up with the first of
    them; and the last point of each but the last: [layers, m - 1, homes * experts]."""
    layers, across = placement.layers, len(part) * placement.experts
    home, layer, slot = np.nonzero(part > 0.0)
    place = layer * across + home * placement.experts + placement.expert_of_slot[layer, slot]
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=layers * across)
    nth = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.zeros((layers * across, int(counts.max())), np.int64)
    length = np.zeros(slots.shape)
    slots[place[order], nth] = slot[order]
    length[place[order], nth] = part[home, layer, slot][order]
    slots = np.where(np.arange(slots.shape[1]) < counts[:, None], slots, slots[:, :1])
    ends = np.clip(np.rint(length.cumsum(axis=1) * 2.0**32) - 1.0, 0.0, _LAST).astype(np.uint32)
    ends[np.arange(ends.shape[1]) >= counts[:, None] - 1] = _LAST
    shape = (layers, across, slots.shape[1])
    return slots.reshape(shape), np.ascontiguousarray(ends.reshape(shape)[:, :, :-1].transpose(0, 2, 1))


def _ordinals(values: NDArray[Any]) -> NDArray[np.int64]:
    """int64 [n]: how often each value came before it, in order."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(values) else order
    nth = np.arange(len(values))
    found = np.empty(len(values), np.int64)
    found[order] = nth - np.repeat(begins, np.diff(begins, append=len(values)))
    return found


def _parts(placement: Placement) -> tuple[Table, Table, Table]:
    """keep, spill, near as shares: float64 [layers, slots]."""
    keep, spill, near = (np.asarray(part, np.float64) / FULL for part in placement.split)
    return keep, spill, near


def _sums(values: Table, place: NDArray[Any], places: int) -> Table:
    """float64 [layers, places]: values [layers, slots] added up by place [layers, slots]."""
    layers = len(values)
    index = (np.arange(layers)[:, None] * places + place).ravel()
    return np.asarray(np.bincount(index, values.ravel(), layers * places).reshape(layers, places))
