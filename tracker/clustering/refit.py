"""One refit of the clusters: from values to values, so that it can run in any thread. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.signatures import MIN_PROBABILITY, ClusterModel
from tracker.clustering.mixture_fit import (
    DOUBTFUL,
    FitSample,
    apart,
    k_means,
    likeliest,
    neighbours,
    sharpest,
    split,
)
from tracker.clustering.reservoir import Sample, counts

ROUNDS = 6
"""Limit of split rounds in one refit."""

MUCH_MORE = 2.0
"""Ratio by which a split's gain must exceed a merge's loss, to take its slot."""


class ClusterSplit(NamedTuple):
    """A previously unused slot took over a part of `parent`."""

    parent: int
    child: int


class ClusterMerge(NamedTuple):
    """The requests of `freed` now belong to `kept`; the slot is unused."""

    kept: int
    freed: int


class RefitResult(NamedTuple):
    """Result of a refit.

    labels: slot of each fitted sample, by its number. moved: for each change, the moved share of the mass of
    the parent (or of the freed slot). profiles: float32 [K, layers, experts]; unused slots have the
    traffic's. shares: float64 [K], of the samples' pairs; 0 for unused slots.
    """

    labels: dict[int, int]
    changes: list[ClusterSplit | ClusterMerge]
    moved: list[float]
    profiles: NDArray[np.float32]
    shares: NDArray[np.float64]
    sharpness: float
    divergence: float
    """Kullback-Leibler divergence from the previous model, nats per pair, mean over layers, weighted by
    shares
    """


@dataclass(frozen=True, eq=False)
class Refit:
    """A refit to run. weights: float64 [n]. labels: previous slots of samples, by number. used: slots with a
    meaning.
    """

    samples: tuple[Sample, ...]
    weights: NDArray[np.float64]
    labels: dict[int, int]
    model: ClusterModel
    used: frozenset[int]
    prior_pairs: float

    def run(self) -> RefitResult:
        """Run the refit. Takes up to a second or two with a full reservoir at 58 x 256."""
        fit = _Fit(self)
        fit.merge()
        fit.split()
        return fit.fitted()


class _Fit:
    """State of a refit: `labels`, intp [n], is the result in progress."""

    def __init__(self, job: Refit) -> None:
        self._job = job
        self._clusters, self._layers, _ = job.model.profiles.shape
        prompt, completion = counts(job.samples)
        self._requests = FitSample(prompt, completion, job.weights, job.prior_pairs, self._layers)
        self._sharpness = job.model.sharpness
        self._changes: list[ClusterSplit | ClusterMerge] = []
        self._moved: list[float] = []
        self._made_room = False
        self._labels = self._begin()
        self._reassign()

    def _begin(self) -> NDArray[np.intp]:
        """Start from each sample's previous slot. New samples join the likeliest. Slots without remaining
        members are freed.
        """
        flat = self._job.model.profiles.reshape(self._clusters, -1)
        used = np.array(sorted(self._job.used))
        known = self._job.labels
        guessed = likeliest(self._requests, flat, used)
        labels = np.array(
            [
                known.get(sample.number, guess)
                for sample, guess in zip(self._job.samples, guessed, strict=True)
            ],
            np.intp,
        )
        alive = np.unique(labels)
        for slot in np.setdiff1d(used, alive):
            alike = np.sqrt(flat[alive]) @ np.sqrt(flat[slot])
            self._freed(int(alive[alike.argmax()]), int(slot))
        return labels

    def _freed(self, kept: int, slot: int) -> None:
        self._changes.append(ClusterMerge(kept, slot))
        self._moved.append(1.0)

    def _reassign(self) -> None:
        """Run k-means from the current labels. A slot that loses all members is merged into the slot that
        most of them joined.
        """
        before = self._labels
        self._labels = k_means(self._requests.gram, before, self._requests.fit_weight, self._clusters)
        for slot in np.setdiff1d(before, self._labels):
            went = np.bincount(self._labels[before == slot], minlength=self._clusters)
            self._freed(int(went.argmax()), int(slot))

    def _members(self, slot: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._labels == slot)

    def merge(self) -> None:
        """Merge nearest neighbours until every pair predicts better apart."""
        proven: set[tuple[int, int]] = set()
        while (pair := self._nearest(proven)) is not None:
            first, second = pair
            gain = apart(self._requests, self._members(first), self._members(second))
            if gain is not None and gain.certainty > DOUBTFUL:
                proven.add(pair)
                continue
            kept = self._merge(first, second)
            proven = {other for other in proven if kept not in other}

    def _merge(self, first: int, second: int) -> int:
        """Merge two slots into the heavier one, and return it."""
        weights = [self._requests.fit_weight[self._members(slot)].sum() for slot in (first, second)]
        kept, freed = (first, second) if weights[0] >= weights[1] else (second, first)
        self._labels = np.where(self._labels == freed, kept, self._labels)
        self._freed(kept, freed)
        return kept

    def _nearest(self, proven: set[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the nearest pair, among the pairs of a slot and its nearest slot not proven apart."""
        distances = neighbours(self._requests.gram, self._labels, self._requests.fit_weight, self._clusters)
        found: list[tuple[float, tuple[int, int]]] = []
        for slot in np.unique(self._labels).tolist():
            other = int(distances[slot].argmin())
            pair = (min(slot, other), max(slot, other))
            if distances[slot, other] < np.inf and pair not in proven:
                found.append((float(distances[slot, other]), pair))
        return min(found)[1] if found else None

    def split(self) -> None:
        """Split clusters that predict better in two, greatest gain first, while slots are free."""
        unsplit: set[bytes] = set()
        for _ in range(ROUNDS):
            self._sharpen()
            if not self._split_once(unsplit):
                break
            self._reassign()

    def _split_once(self, unsplit: set[bytes]) -> bool:
        """Do one round. `unsplit` holds the member lists that are known not to split."""
        found = []
        for slot in np.unique(self._labels).tolist():
            members = self._members(slot)
            if members.tobytes() in unsplit:
                continue
            sides = split(self._requests, members)
            if sides is None:
                unsplit.add(members.tobytes())
            else:
                found.append((-sides[1].total, slot, members, sides[0]))
        parted = False
        for less, slot, members, halves in sorted(found, key=lambda each: each[:2]):
            short = not self._free()
            if short and not self._make_room(slot, -less):
                break
            self._part(slot, self._free()[0], members, halves)
            parted = True
            if short:
                break
        return parted

    def _make_room(self, slot: int, gain: float) -> bool:
        """Free a slot: merge the two neighbours with the smallest loss, if splitting `slot` gains much more.
        Once per refit.
        """
        if self._made_room:
            return False
        distances = neighbours(self._requests.gram, self._labels, self._requests.fit_weight, self._clusters)
        pairs = {
            (min(one, two), max(one, two))
            for one in np.unique(self._labels).tolist()
            for two in [int(distances[one].argmin())]
        }
        losses = {
            pair: apart(self._requests, self._members(pair[0]), self._members(pair[1]))
            for pair in pairs
            if slot not in pair
        }
        cheapest = min(
            ((loss.total, pair) for pair, loss in losses.items() if loss is not None), default=None
        )
        if cheapest is None or gain <= MUCH_MORE * max(cheapest[0], 0.0):
            return False
        self._made_room = True
        self._merge(*cheapest[1])
        return True

    def _free(self) -> list[int]:
        """Return the unused slots; those just freed come last."""
        freed = {change.freed for change in self._changes if isinstance(change, ClusterMerge)}
        unused = set(range(self._clusters)) - set(np.unique(self._labels).tolist())
        return sorted(unused, key=lambda slot: (slot in freed, slot))

    def _part(self, parent: int, child: int, members: NDArray[np.intp], sides: NDArray[np.intp]) -> None:
        """Split a slot's members. The lighter side gets the new slot."""
        weights = self._requests.fit_weight[members]
        lighter = int(weights @ sides <= weights @ (1 - sides))
        leaving = sides == lighter
        self._labels = self._labels.copy()
        self._labels[members[leaving]] = child
        self._changes.append(ClusterSplit(parent, child))
        self._moved.append(float(weights[leaving].sum() / weights.sum()))

    def _shares(self) -> NDArray[np.float64]:
        mass = np.bincount(self._labels, self._requests.weight * self._requests.pairs, self._clusters)
        return np.asarray(mass / mass.sum())

    def _sharpen(self) -> None:
        self._sharpness = sharpest(self._requests, self._labels, self._shares(), self._sharpness)

    def fitted(self) -> RefitResult:
        self._sharpen()
        profiles = self._requests.profiles(self._labels, self._clusters).reshape(
            self._job.model.profiles.shape
        )
        labels = {
            sample.number: int(slot) for sample, slot in zip(self._job.samples, self._labels, strict=True)
        }
        shares = self._shares()
        return RefitResult(
            labels,
            self._changes,
            self._moved,
            profiles,
            shares,
            self._sharpness,
            _divergence(profiles, self._job.model.profiles, shares),
        )


def _divergence(new: NDArray[np.float32], old: NDArray[np.float32], shares: NDArray[np.float64]) -> float:
    used = np.flatnonzero(shares)
    ratios = np.log(np.maximum(new[used], MIN_PROBABILITY)) - np.log(np.maximum(old[used], MIN_PROBABILITY))
    return float(shares[used] @ (new[used] * ratios).sum(axis=2).mean(axis=1))
