"""Decisions name the experts of their prediction while its clusters are in memory."""

import gc
import weakref

import numpy as np
import pytest
from msgspec import structs

from fleet.signatures import ClusterModel
from router.prediction.predictor import NAMED_EXPERTS, likely_experts
from tests.router.decision_builders import decided, view_of
from tests.router.scheduling.test_decision import prediction_of


def model(version: int = 1, clusters: int = 3, layers: int = 5, experts: int = 9) -> ClusterModel:
    profiles = (
        np.random.default_rng(version).dirichlet(np.full(experts, 0.3), (clusters, layers)).astype(np.float32)
    )
    return ClusterModel(
        version=version, profiles=profiles, shares=np.full(clusters, 1 / clusters, np.float32), sharpness=1.0
    )


def test_the_likeliest_experts_of_each_layer_are_named_most_likely_first() -> None:
    clusters, weights = model(), np.array([0.7, 0.3, 0.0], np.float32)
    expected = 0.7 * clusters.profiles[0] + 0.3 * clusters.profiles[1]
    for one, row in zip(likely_experts(clusters, weights), expected, strict=True):
        assert one.experts == sorted(range(9), key=lambda expert: -row[expert])[:NAMED_EXPERTS]
        assert one.shares == pytest.approx(sorted(row.tolist(), reverse=True)[:NAMED_EXPERTS], rel=1e-5)


def test_layers_with_few_experts_name_them_all() -> None:
    found = likely_experts(model(experts=2), np.array([1, 0, 0], np.float32))
    assert [len(one.experts) for one in found] == [2] * 5


def test_a_decision_keeps_no_clusters_in_memory_and_then_names_no_experts() -> None:
    view, _ = view_of({"ranks": 2})
    clusters = model()
    table = view.target_table("demo")
    prediction = prediction_of([0.0] * 2)
    prediction = structs.replace(
        prediction,
        request=structs.replace(prediction.request, weights=np.array([1, 0, 0], np.float32)),
        clusters=weakref.ref(clusters),
    )
    decision = decided(table, prediction=prediction)
    prediction = decision.record().prediction
    assert prediction is not None
    assert [one.layer for one in prediction.experts] == list(range(5))
    del clusters
    gc.collect()
    later = decision.record().prediction
    assert later is not None
    assert later.experts == []
