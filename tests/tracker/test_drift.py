"""When popularity is said to have shifted, and when not: on traffic of whole requests, in virtual time."""

import msgspec
import numpy as np
import pytest

from tests.tracker.traffic_of_requests import Requests, constant, detector, flipped, of_the_demo_model, seconds_of, watch
from tracker.config import TrackerConfig
from tracker.drift import Drift
from tracker.noise import divergence_by_layer

FAST = 20.0
CODE, PROSE, EASTERN = constant(1, 1, 1, 0, 0, 0, 0, 0, 0), constant(0, 0, 0, 1, 1, 1, 0, 0, 0), constant(0, 0, 0, 0, 0, 0, 1, 1, 1)


@pytest.fixture(scope="module")
def requests() -> Requests:
    return of_the_demo_model()


@pytest.mark.parametrize("rate", [1.0, 10.0, 50.0])
@pytest.mark.parametrize(("before", "after"), [(CODE, PROSE), (PROSE, EASTERN)])
def test_a_flip_of_the_domain_mix_is_noticed_once_and_within_three_fast_time_constants(requests: Requests, rate: float, before, after) -> None:  # type: ignore[no-untyped-def]
    traffic = seconds_of(requests, flipped(before, after, 600), lambda _: rate, 720, np.random.default_rng(1))
    course = watch(detector(requests), traffic)
    assert len(course.alarms) == 1, course.said
    assert 600 < course.alarms[0] <= 600 + 3 * FAST
    shift = course.said[0][1]
    assert shift.divergence > shift.threshold
    assert shift.layers


def test_a_detector_that_was_restarted_goes_on_as_if_it_had_not(requests: Requests) -> None:
    kept, restarted = detector(requests), detector(requests)
    traffic = seconds_of(requests, flipped(CODE, PROSE, 600), lambda _: 5.0, 1200, np.random.default_rng(2))
    for second, counts, tokens in traffic:
        if second == 660:
            assert kept.shifted
        for drift in (kept, restarted):
            drift.observe(counts, tokens, float(second))
        if second in (590, 660):
            kept.judge(second + 0.5)
            restarted = Drift.restore(TrackerConfig(), msgspec.msgpack.decode(msgspec.msgpack.encode(kept.state())))
        assert restarted.judge(second + 0.5) == kept.judge(second + 0.5)
        assert (restarted.divergence, restarted.threshold) == (kept.divergence, kept.threshold)


def test_the_divergence_is_that_of_the_textbook() -> None:
    chance = np.random.default_rng(3)
    first, second = chance.integers(0, 50, (2, 6, 16)), chance.integers(0, 50, (2, 6, 16))
    for counts, others in zip(first, second, strict=True):
        expected = []
        for row, other in zip(counts, others, strict=True):
            p, q = row / row.sum(), other / other.sum()
            middle = (p + q) / 2
            expected.append(sum(0.5 * side[at] * np.log(side[at] / middle[at]) for side in (p, q) for at in range(16) if side[at] > 0))
        np.testing.assert_allclose(divergence_by_layer(counts, others), expected, rtol=1e-9)
