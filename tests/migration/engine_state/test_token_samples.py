"""Sampled tokens known to the planner: bounded, spread over time, and checked."""

import numpy as np
import pytest

from fleet.facts.activity import TokensSampled
from fleet.routings import SAMPLED_TOKENS
from migration.config import MigrationConfig
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent
from migration.engine_state.token_samples import MAX_REQUESTS, TokenSamples
from tests.migration.builders import FIRST, SHAPE, joined
from tests.migration.engine_state.test_demand_windows import steady

ENTRY = EngineEntry("a", 1, FIRST)


def request(expert: int, tokens: int = SAMPLED_TOKENS) -> bytes:
    return np.full((tokens, SHAPE.layers, SHAPE.top_k), expert, "<u2").tobytes()


def report(*requests: bytes) -> TokensSampled:
    return TokensSampled(engine="a", worker_id=1, rank=0, model="m", requests=requests)


def test_the_newest_requests_are_kept_and_no_more_than_the_limit() -> None:
    samples = TokenSamples(SHAPE)
    assert samples.recent() is None
    for at in range(2 * MAX_REQUESTS):
        samples.add([request(at % 8)], float(at), 1.0)
    found = samples.recent()
    assert found is not None
    assert found.shape == (MAX_REQUESTS, SAMPLED_TOKENS, SHAPE.layers, SHAPE.top_k)
    assert found[:, 0, 0, 0].tolist() == [at % 8 for at in range(MAX_REQUESTS, 2 * MAX_REQUESTS)]


def test_where_requests_are_many_the_kept_ones_span_the_time_asked_for() -> None:
    samples = TokenSamples(SHAPE)
    for second in range(400):  # experts 0 to 7 in turn, 50 seconds each
        samples.add([request(second // 50)] * 100, float(second), 200.0)
    found = samples.recent()
    assert found is not None
    times = np.bincount(found[:, 0, 0, 0], minlength=8)
    assert times[:3].sum() == 0
    assert times[4:] == pytest.approx(np.full(4, MAX_REQUESTS / 4), abs=2)


@pytest.mark.parametrize(
    "wrong",
    [request(0, SAMPLED_TOKENS - 1), request(SHAPE.experts), b""],
    ids=["tokens", "expert", "nothing"],
)
def test_tokens_that_do_not_fit_are_refused_and_none_of_them_is_kept(wrong: bytes) -> None:
    watch = DemandWindows(MigrationConfig())
    watch.joined(joined(), ENTRY, 0.0)
    with pytest.raises(InvalidPlacementEvent, match="sampled token"):
        watch.sampled(report(request(1), wrong), 1.0)
    steady(watch, (1.0, 1.0), 0, 20)
    assert watch.view(ENTRY, 20.0).tokens is None


def test_a_view_has_them_and_a_shift_of_demand_forgets_them() -> None:
    watch = DemandWindows(MigrationConfig())
    watch.joined(joined(), ENTRY, 0.0)
    steady(watch, (1.0, 1.0), 0, 20)
    watch.sampled(report(request(1), request(2)), 20.0)
    watch.sampled(TokensSampled(engine="b", worker_id=9, rank=0, model="m", requests=(request(3),)), 20.0)
    found = watch.view(ENTRY, 20.0).tokens
    assert found is not None
    assert found[:, 0, 0, 0].tolist() == [1, 2]
    watch.shifted("m", 21.0)
    assert watch.view(ENTRY, 21.0).tokens is None


def test_engines_that_move_their_experts_themselves_need_none() -> None:
    watch = DemandWindows(MigrationConfig())
    watch.joined(joined(rearranges=True), ENTRY, 0.0)
    steady(watch, (1.0, 1.0), 0, 20)
    watch.sampled(report(request(1)), 20.0)
    assert watch.view(ENTRY, 20.0).tokens is None
