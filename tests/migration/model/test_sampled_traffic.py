"""Sampled tokens under homes: where they are put, and what they say of a placement."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.dispatch import COVER
from fleet.placement import linear
from fleet.signatures import ClusterModel
from migration.config import MigrationConfig
from migration.model import sampled_traffic as module
from migration.model.engine_view import EngineView
from migration.model.sampled_traffic import MIN_REQUESTS, SampledTokens, sampled_traffic
from migration.planning.problem import PlanningQuestion, prepare
from migration.solvers.load_cap import held_of
from tests.migration.loop_model import EXPERTS, LAYERS, RANKS, Loop

DOMAINS = 9
EVERY = np.arange(LAYERS)


def view(cycles: int = 4) -> EngineView:
    loop = Loop(np.full(DOMAINS, 1 / DOMAINS), sampled=True)
    loop.run(cycles)
    return loop.view()


def one_cluster_per_half(found: EngineView) -> EngineView:
    """Clusters 0 and 1 need the lower and the upper half of the experts, as do every other request's
    tokens."""
    assert found.tokens is not None
    profiles = np.full((2, LAYERS, EXPERTS), 1e-6, np.float32)
    profiles[0, :, : EXPERTS // 2] = profiles[1, :, EXPERTS // 2 :] = 2 / EXPERTS
    profiles /= profiles.sum(axis=2, keepdims=True)
    tokens = (found.tokens % (EXPERTS // 2)).astype(np.uint16)
    tokens[1::4] += EXPERTS // 2
    tokens[::4] += EXPERTS // 2
    return replace(found, clusters=ClusterModel(1, profiles, np.full(2, 0.5, np.float32), 1.0), tokens=tokens)


def test_tokens_are_at_the_homes_of_their_requests_as_far_as_requests_follow_them() -> None:
    found = one_cluster_per_half(view())
    homes = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.25, 0.75, 0.0]])
    for leak in (0.0, 0.4):
        traffic = sampled_traffic(found, EVERY, homes, leak)
        assert traffic is not None
        for part in traffic:
            cluster = (part.experts[:, 0, 0] >= EXPERTS // 2).astype(int)
            for which in (0, 1):
                share = np.bincount(part.homes[cluster == which], minlength=RANKS) / (cluster == which).sum()
                assert share == pytest.approx((1 - leak) * homes[which] + leak / RANKS, abs=0.02)


def test_without_homes_tokens_are_anywhere() -> None:
    for homes in (None, np.zeros((DOMAINS, RANKS))):
        traffic = sampled_traffic(view(), EVERY, homes, 0.0)
        assert traffic is not None
        share = np.bincount(traffic.fit.homes, minlength=RANKS) / len(traffic.fit.homes)
        assert share == pytest.approx(np.full(RANKS, 0.25), abs=0.01)


def test_the_two_parts_are_of_different_requests_and_of_the_layers_asked_for() -> None:
    found = view()
    traffic = sampled_traffic(found, np.array([1, 3]), None, 0.0)
    assert traffic is not None
    assert found.tokens is not None
    tokens: NDArray[np.uint16] = found.tokens[:, :, [1, 3]]
    assert (traffic.fit.experts == tokens[::2].reshape(-1, *tokens.shape[2:])).all()
    assert (traffic.evaluation.experts == tokens[1::2].reshape(-1, *tokens.shape[2:])).all()


def test_too_few_requests_or_another_rule_of_dispatch_say_nothing() -> None:
    found = view()
    assert found.tokens is not None
    for other in (
        replace(found, tokens=None),
        replace(found, tokens=found.tokens[: MIN_REQUESTS - 1]),
        replace(found, clusters=None),
        replace(found, dispatch=COVER),
    ):
        assert sampled_traffic(other, EVERY, None, 0.0) is None


def test_sending_is_dearer_or_cheaper_by_what_tokens_need_together_and_the_rest_is_as_before() -> None:
    found = view()
    assert found.tokens is not None
    served = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS)
    # k experts of a token side by side are on one rank; 8 apart, each is on another.
    first = (found.tokens[..., :1] // 8) * 8
    near, far = first + np.arange(4), found.tokens[..., :1] % 8 + 8 * np.arange(4)

    def priced(tokens: NDArray[np.int64] | None) -> tuple[float, float, float]:
        one = replace(found, placement=served, tokens=None if tokens is None else tokens.astype(np.uint16))
        figures = prepare(one, PlanningQuestion("roost", 0), MigrationConfig()).before.figures
        return figures.remote_ranks, figures.seconds.dispatch, figures.seconds.experts

    plain, together, scattered = priced(None), priced(near), priced(far)
    assert together[0] < 0.6 * plain[0]
    assert scattered[0] > 1.2 * plain[0]
    for one in (together, scattered):
        assert one[1] / plain[1] == pytest.approx(one[0] / plain[0], rel=0.05)
        assert one[2] == plain[2]


def test_of_many_tokens_a_part_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = sampled_traffic(view(), EVERY, None, 0.0)
    assert traffic is not None
    held = held_of(linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS).expert_of_slot, RANKS, EXPERTS)
    every = traffic.together(held)
    monkeypatch.setattr(module, "_CELLS", traffic.evaluation.experts.size * RANKS // 3)
    assert traffic.together(held) == pytest.approx(every, abs=0.1)
    assert traffic.together(held).tolist() != every.tolist()


def test_a_part_of_the_tokens_is_from_all_requests_and_from_everywhere_in_them() -> None:
    requests, each = 60, 16
    places = np.arange(requests * each).reshape(-1, 1, 1)
    for most in (60, 120, 240, 500):
        found = SampledTokens(places, np.zeros(requests * each, np.int64)).thinned(most)
        request, place = np.divmod(found.experts.ravel(), each)
        assert len(found.homes) <= most
        assert len(set(place.tolist())) == each
        assert np.diff(request).max() <= 2
    assert len(SampledTokens(places, np.zeros(requests * each, np.int64)).thinned(960).homes) == 960
