"""Signatures over clusters that have since split or merged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fleet.signatures import ClusterModel, pack, unpack
from tracker.clustering.refit import ClusterMerge, ClusterSplit
from tracker.prediction.cluster_remap import (
    MAX_CHANGES,
    RemapHistory,
    SlotChange,
    carried,
    carried_weights,
    dense,
)

K = 6
SHARES = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], np.float32)


def model(version: int, shares: np.ndarray = SHARES) -> ClusterModel:
    return ClusterModel(version, np.full((K, 1, 2), 0.5, np.float32), np.asarray(shares, np.float32), 0.1)


@settings(deadline=None, max_examples=50)
@given(arrays(np.float64, (5, K), elements=st.floats(0.001, 1.0)))
def test_many_are_unpacked_as_each_is(weights: np.ndarray) -> None:
    packed = pack(weights / weights.sum(axis=1, keepdims=True))
    assert dense(packed, SHARES) == pytest.approx(
        np.array([unpack(each, SHARES) for each in packed]), abs=1e-6
    )


def test_after_a_merge_the_kept_cluster_has_what_both_had() -> None:
    packed = pack(np.array([[0.5, 0.0, 0.3, 0.2, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]))
    after = dense(carried(packed, SlotChange(2, 2, 0, 1.0)), SHARES)
    assert after[0] == pytest.approx([0.8, 0, 0, 0.2, 0, 0], abs=0.01)
    assert after[1] == pytest.approx(np.eye(K)[1], abs=0.01)


def test_after_a_split_parent_and_child_share_it() -> None:
    packed = pack(
        np.array(
            [
                [0.8, 0.2, 0.0, 0.0, 0.0, 0.0],
                [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
                [0.25, 0.25, 0.25, 0.25, 0.0, 0.0],
            ]
        )
    )
    after = dense(carried(packed, SlotChange(2, 0, 5, 0.25)), SHARES)
    assert after[0] == pytest.approx([0.6, 0.2, 0, 0, 0, 0.2], abs=0.01)
    assert after[1] == pytest.approx(np.eye(K)[1], abs=0.01)
    assert after[2, 0] == pytest.approx(0.1875, abs=0.03)
    assert after.sum(axis=1) == pytest.approx(1.0)


def test_weights_are_carried_exactly() -> None:
    weights = np.array([[0.5, 0.1, 0.4, 0, 0, 0]])
    assert carried_weights(weights, SlotChange(2, 2, 0, 1.0))[0] == pytest.approx([0.9, 0.1, 0, 0, 0, 0])
    assert carried_weights(weights, SlotChange(2, 2, 3, 0.25))[0] == pytest.approx([0.5, 0.1, 0.3, 0.1, 0, 0])


def test_what_happened_since_a_version_is_known_in_order() -> None:
    history = RemapHistory()
    history.adopt(model(1), [])
    history.adopt(model(4), [ClusterSplit(0, 5)])
    history.adopt(model(6), [ClusterMerge(1, 2), ClusterSplit(3, 2)])
    history.adopt(model(7), [])
    assert [(change.source, change.target) for change in history.since(1) or []] == [(0, 5), (2, 1), (3, 2)]
    assert [(change.source, change.target) for change in history.since(4) or []] == [(2, 1), (3, 2)]
    assert history.since(6) == []
    assert (history.since(1) or [])[0].share == pytest.approx(0.25)


def test_more_changes_than_are_remembered_make_old_versions_mean_nothing() -> None:
    history = RemapHistory()
    for version in range(1, MAX_CHANGES + 10):
        history.adopt(model(version), [ClusterSplit(0, 5)] if version % 2 else [ClusterMerge(0, 5)])
    assert history.since(1) is None
    assert history.since(MAX_CHANGES + 9) == []
    assert len(history.since(MAX_CHANGES - 20) or []) == 29


def test_a_restart_changes_nothing() -> None:
    history, again = RemapHistory(), RemapHistory()
    history.adopt(model(1), [])
    history.adopt(model(3), [ClusterSplit(0, 5)])
    again.take_over(history.state())
    again.adopt(model(3), [])
    assert again.state() == history.state()
    assert again.since(1) == history.since(1)
