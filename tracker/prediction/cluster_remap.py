"""Conversion of signatures over clusters that have since split or merged. Pure.

Slots keep their meaning, so a signature remains valid in later versions of the model, except for structural
changes. After a merge the weight of the freed slot belongs to the kept one. After a split it is unknown
whether parent or child was meant: each gets its share. If a packed signature has no room for the child, the
child's share is left unassigned.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import ByteArray
from fleet.signatures import NAMED, ClusterModel
from tracker.clustering.refit import ClusterMerge, ClusterSplit

MAX_CHANGES = 128
"""Structural changes that are remembered. Older signatures are rejected."""


class SlotChange(NamedTuple):
    """Move of a share of the weight of slot `source` to `target` (1: the source was freed)."""

    version: int
    source: int
    target: int
    share: float


def dense(packed: ByteArray, shares: NDArray[np.float32]) -> NDArray[np.float32]:
    """Unpack signatures [n, PACKED] to float32 [n, K]: a vectorised `fleet.signatures.unpack`."""
    clusters, named = packed[:, 0::2], packed[:, 1::2].astype(np.float32)
    named /= np.maximum(named.sum(axis=1, keepdims=True), 255.0)
    weights = shares * np.maximum(1.0 - named.sum(axis=1, keepdims=True), 0.0)
    lines = np.arange(len(packed))
    for at in range(NAMED):
        weights[lines, clusters[:, at]] += named[:, at]
    return np.asarray(weights, np.float32)


def carried(packed: ByteArray, change: SlotChange) -> ByteArray:
    """Return packed signatures after a change."""
    after = packed.copy()
    if change.share >= 1.0:
        after[:, 0::2][packed[:, 0::2] == change.source] = change.target
        return after
    slots, weights = after[:, 0::2], after[:, 1::2]
    place = ((slots == change.source) & (weights > 0)).argmax(axis=1)
    lines = np.flatnonzero(
        (slots[np.arange(len(after)), place] == change.source) & (weights[np.arange(len(after)), place] > 0)
    )
    place = place[lines]
    part = np.floor(change.share * weights[lines, place] + 0.5).astype(np.uint8)
    weights[lines, place] -= part
    smallest = weights[lines].argmin(axis=1)
    room = (weights[lines, smallest] < part) & (smallest != place)
    slots[lines[room], smallest[room]] = change.target
    weights[lines[room], smallest[room]] = part[room]
    return after


def carried_weights(weights: NDArray[Any], change: SlotChange) -> NDArray[Any]:
    """Return weights [n, K] after a change."""
    after = weights.copy()
    after[:, change.target] += weights[:, change.source] * change.share
    after[:, change.source] -= weights[:, change.source] * change.share
    return after


class RemapHistory:
    """Known versions of a cluster model, and the changes since each."""

    def __init__(self) -> None:
        self._changes: deque[SlotChange] = deque()
        self._oldest: int | None = None
        """first version with usable signatures: with at least two clusters"""
        self.model: ClusterModel | None = None

    def adopt(self, model: ClusterModel, changes: Sequence[ClusterSplit | ClusterMerge]) -> list[SlotChange]:
        """Adopt another version, and return the changes in order. ValueError if it is older or has another
        shape.
        """
        known = self.model
        if known is not None and (
            model.version < known.version or model.profiles.shape != known.profiles.shape
        ):
            here, there = (known.version, known.profiles.shape), (model.version, model.profiles.shape)
            raise ValueError(
                f"cluster model: version and shape {there} cannot follow {here}; start learning anew for"
                " another shape"
            )
        moves = [_slot_change(model, change) for change in changes]
        self._changes.extend(moves)
        while len(self._changes) > MAX_CHANGES:
            self._oldest = self._changes.popleft().version
        if self._oldest is None and int((model.shares > 0).sum()) > 1:
            self._oldest = model.version
        self.model = model
        return moves

    def since(self, version: int) -> list[SlotChange] | None:
        """Return the changes after a version; None if its signatures are unusable. ValueError for unknown
        versions.
        """
        if self.model is None or version > self.model.version:
            raise ValueError(
                f"clusters: version {version} is not known here; report over the version that was published"
                " last"
            )
        if self._oldest is None or version < self._oldest:
            return None
        return [change for change in self._changes if change.version > version]

    def state(self) -> dict[str, Any]:
        """Return the changes, for msgpack. The owner saves the model itself."""
        return {"changes": [list(change) for change in self._changes], "oldest": self._oldest}

    def take_over(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._changes = deque(
            SlotChange(int(version), int(source), int(target), float(share))
            for version, source, target, share in state["changes"]
        )
        self._oldest = None if state["oldest"] is None else int(state["oldest"])


def _slot_change(model: ClusterModel, change: ClusterSplit | ClusterMerge) -> SlotChange:
    if isinstance(change, ClusterMerge):
        return SlotChange(model.version, change.freed, change.kept, 1.0)
    both = float(model.shares[change.parent] + model.shares[change.child])
    share = float(model.shares[change.child]) / both if both > 0 else 0.5
    return SlotChange(model.version, change.parent, change.child, min(share, 0.999))
