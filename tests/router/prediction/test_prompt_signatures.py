"""What a prefill worker says that a prompt activated takes the place of the prediction."""

from typing import Any

import numpy as np
import pytest

from fleet.prediction import SOURCES
from router.prediction.predictor import keys_of
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision, RemotePrefill
from router.scheduling.routing_request import RoutingRequest
from tests.router.learnt_tables import halves
from tests.router.prediction.test_predicted_requests import CHAT, engine, house, reports, teach
from tests.router.router_fixture import House, Serve
from tests.router.scheduling.test_decision import prediction_of

__all__ = ["house", "reports"]
TOKENS = 40
FIRST_HALF, SECOND_HALF = ([9, 9, 0, 0], [0, 0, 9, 9])


def decided(house: House, **prefill: Any) -> Decision:
    """The decision for a prompt of a session that used to activate experts 0 and 1."""
    keys = keys_of("s", None, "demo", CHAT)
    need = RoutingRequest(
        model="demo",
        prompt=TokenPrompt(list(range(TOKENS)), 0),
        context=60,
        output=20,
        tokenizer=house.service.scheduler.target_table("demo").sent_tokenizer,
        keys=keys,
        prefill=RemotePrefill(**prefill) if prefill else None,
    )
    return house.service.decide(need, "d")


async def learnt(house: House, serve_rank: Serve, packed: bytes, **more: Any) -> None:
    await engine(house, serve_rank, packed)
    keys = keys_of("s", None, "demo", CHAT)
    await teach(house, sessions={keys.session: ((0.9, 0.1), 5000.0)}, reliability=0.9, **more)


async def test_the_rank_with_the_experts_of_the_prompt_is_chosen_whatever_was_predicted(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    await learnt(house, serve_rank, byte_archive)
    assert decided(house).target.rank == 0
    for half, rank in ((FIRST_HALF, 0), (SECOND_HALF, 1)):
        decision = decided(house, experts=np.array([half] * 2), tokens=TOKENS)
        assert decision.target.rank == rank
        record = decision.record()
        assert record.prediction is not None
        assert record.prediction.best == "prefill"
        assert record.prediction.clusters[0].cluster == rank
        assert [one.source for one in record.prediction.sources] == ["session", "prefill"]
        expected = halves().signature(np.array([half] * 2))
        assert record.prediction.clusters[0].weight == pytest.approx(float(expected.max()), rel=1e-5)


async def test_a_prediction_that_has_earned_no_gain_does_not_hold_back_what_is_known(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    await learnt(house, serve_rank, byte_archive, gain=0.0)
    assert not decided(house).scores.ms("experts").any()
    decision = decided(house, experts=np.array([SECOND_HALF] * 2), tokens=TOKENS)
    assert decision.scores.ms("experts").any()
    assert decision.target.rank == 1


async def test_tokens_from_the_cache_count_as_predicted(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    await learnt(house, serve_rank, byte_archive)
    decision = decided(house, experts=np.array([SECOND_HALF] * 2), tokens=TOKENS // 8)
    assert decision.target.rank == 0
    assert decision.record().prediction.best == "session"  # type: ignore[union-attr]


@pytest.mark.parametrize("experts", [None, np.ones((2, 5), np.int64)])
async def test_without_activations_of_the_models_shape_the_prediction_stands(
    house: House, serve_rank: Serve, byte_archive: bytes, experts: Any
) -> None:
    await learnt(house, serve_rank, byte_archive)
    prediction, other = decided(house).prediction, decided(house, experts=experts, tokens=TOKENS).prediction
    assert prediction is not None
    assert other is not None
    assert other.request.prompt is None
    assert other.request.weights.tolist() == prediction.request.weights.tolist()


def test_signatures_are_added_by_their_tokens() -> None:
    predicted = prediction_of([0.0], gain=0.5).request
    known = predicted.with_prompt(np.array([0.0, 1.0], np.float32), 0.75, 30)
    assert known.weights == pytest.approx([0.25 * 0.8, 0.75 + 0.25 * 0.2])
    assert known.gain == pytest.approx(0.75 + 0.25 * 0.5)
    assert known.confidence == pytest.approx(0.75 + 0.25 * predicted.confidence)
    assert known.prompt is not None
    assert known.prompt.predicted is predicted.weights
    assert "prefill" not in SOURCES, "a source of predictions, for the tracker"
