"""Records of the recorder in vLLM's workers, combined over the ranks: balance by step, experts received,
pairs that left their rank."""

import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.vllm.recorder.roost_recorder import MAP, STEP

Loads = NDArray[np.int64]
"""(token, k) pairs [steps, layers, slots of all ranks]"""
Maps = NDArray[np.int32]
"""expert by slot [layers, slots of all ranks]"""


class Change(NamedTuple):
    """Map in force from a step on."""

    step: int
    expert_of_slot: Maps


class Record(NamedTuple):
    """Counters of all ranks of one run; step s of one rank is step s of the others."""

    by_rank: NDArray[np.int32]
    """pairs of each rank's own tokens [ranks, steps, layers, slots of all ranks]"""
    busy: NDArray[np.bool_]
    """some rank had tokens [steps]"""
    seconds: NDArray[np.float64]
    """monotonic time at the end of each step, of rank 0 [steps]"""
    changes: list[Change]
    """first the initial map"""

    @property
    def ranks(self) -> int:
        return len(self.by_rank)

    def between(self, begin: float, end: float) -> "Record":
        """Return the steps that ended in a time, and the maps in force in them."""
        first, last = np.searchsorted(self.seconds, [begin, end]).tolist()
        within = [
            Change(max(one.step - first, 0), one.expert_of_slot) for one in self.changes if one.step < last
        ]
        initial = max((at for at, one in enumerate(within) if one.step == 0), default=0)
        part = slice(first, last)
        return Record(self.by_rank[:, part], self.busy[part], self.seconds[part], within[initial:])


def read(folder: Path) -> Record:
    """Read a run. Raises ValueError if ranks disagree about the maps."""
    sizes = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    if not sizes or len(sizes) != sizes[0]["ranks"]:
        raise ValueError(f"{folder}: records of {len(sizes)} ranks; did every worker load the recorder?")
    rows = [_rows(folder / f"rank-{size['rank']}.bin", size["layers"], size["slots"]) for size in sizes]
    steps = [one[one["kind"] != MAP] for one in rows]
    length = min(map(len, steps))
    changes = [_changes(one, length) for one in rows]
    for other in changes[1:]:
        if not _same(changes[0], other):
            raise ValueError(f"{folder}: the ranks record different maps")
    steps = [one[:length] for one in steps]
    return Record(
        np.stack([np.where(one["kind"] == STEP, 1, 0)[:, None, None] * one["table"] for one in steps]),
        np.any([one["kind"] == STEP for one in steps], axis=0),
        steps[0]["time"].copy(),
        changes[0],
    )


def _rows(file: Path, layers: int, slots: int) -> NDArray[np.void]:
    form = np.dtype([("time", "<f8"), ("kind", "<i4"), ("table", "<i4", (layers, slots))])
    content = file.read_bytes()
    whole = len(content) // form.itemsize * form.itemsize  # the last record may be cut off by the end
    return np.frombuffer(content[:whole], form)


def _changes(rows: NDArray[np.void], length: int) -> list[Change]:
    """Return the maps and the step from which each is in force."""
    is_map = rows["kind"] == MAP
    at = np.cumsum(~is_map)[is_map]
    found = zip(at.tolist(), rows["table"][is_map], strict=True)
    return [Change(step, table) for step, table in found if step < length]


def _same(one: list[Change], other: list[Change]) -> bool:
    return len(one) == len(other) and all(
        a.step == b.step and np.array_equal(a.expert_of_slot, b.expert_of_slot)
        for a, b in zip(one, other, strict=True)
    )


def balance(record: Record, begin: int = 0, end: int | None = None) -> float:
    """Return mean / highest load of a rank, as the mean over layers and over the steps with tokens."""
    return float(np.mean(balances(record)[begin:end][record.busy[begin:end]]))


def balances(record: Record) -> NDArray[np.float64]:
    """Return mean / highest load of a rank [steps, layers]; 1 in a step without tokens."""
    loads: Loads = record.by_rank.sum(axis=0, dtype=np.int64)
    by_rank = loads.reshape(*loads.shape[:2], record.ranks, -1).sum(axis=-1)
    highest = by_rank.max(axis=-1)
    return np.where(highest > 0, by_rank.mean(axis=-1) / np.maximum(highest, 1), 1.0)


def received(record: Record) -> list[int]:
    """Return for each change of the map how many (layer, rank, expert) it brought to a rank that did not hold
    the expert. Copies within a rank count nothing."""
    maps = [change.expert_of_slot for change in record.changes]
    return [_arrivals(one, two, record.ranks) for one, two in pairwise(maps)]


def _arrivals(before: Maps, after: Maps, ranks: int) -> int:
    width = before.shape[1] // ranks
    count = 0
    for layer in range(len(before)):
        for rank in range(ranks):
            mine = slice(rank * width, (rank + 1) * width)
            count += len(set(after[layer, mine].tolist()) - set(before[layer, mine].tolist()))
    return count


def remote(record: Record, begin: int = 0, end: int | None = None) -> float:
    """Return the share of (token, expert) pairs whose expert's slot is on another rank than the token."""
    pairs = (
        record.by_rank[:, begin:end].sum(axis=(1, 2), dtype=np.int64).reshape(record.ranks, record.ranks, -1)
    )
    flow = pairs.sum(axis=-1)  # [rank of the token, rank of the expert]
    return float(1.0 - np.trace(flow) / max(flow.sum(), 1))
