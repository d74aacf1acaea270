"""Calibration of predictions."""

from typing import Any

import numpy as np
import pytest

from tracker.prediction.calibration import Calibration, recall


def gain(
    count: int, *, predicted: float, worth: float, noise: float = 0.05, off: float = 0.0, seed: int = 0
) -> float:
    """Return the gain after `count` outcomes.

    Predicted differences have this spread. The given share of them comes true, with noise and a biased prior.
    """
    random, calibration = np.random.default_rng(seed), Calibration(1000)
    for _ in range(count):
        difference = predicted * random.normal()
        observed = 0.3 + off + worth * difference + noise * random.normal()
        calibration.learn(0.3 + difference, 0.3, observed, 0.8)
    return calibration.gain


def test_nothing_seen_is_worth_nothing() -> None:
    assert Calibration(1000).gain == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_good_prediction_is_worth_most_after_a_few_hundred_requests(seed: int) -> None:
    assert gain(300, predicted=0.12, worth=1.0, seed=seed) > 0.6


@pytest.mark.parametrize("seed", range(10))
def test_a_prediction_that_has_nothing_to_do_with_what_happens_is_worth_nothing(seed: int) -> None:
    assert gain(600, predicted=0.12, worth=0.0, seed=seed) < 0.1
    assert gain(30, predicted=0.12, worth=0.0, noise=0.15, seed=seed) < 0.1


def test_an_exaggerated_prediction_is_worth_its_slope() -> None:
    assert gain(3000, predicted=0.6, worth=0.5) == pytest.approx(0.5, abs=0.06)


def test_an_understated_prediction_is_worth_no_more_than_one() -> None:
    assert 0.85 < gain(3000, predicted=0.15, worth=2.0) <= 1.0


def test_a_prediction_that_is_wrong_in_direction_is_worth_nothing() -> None:
    assert gain(1000, predicted=0.2, worth=-0.5) == 0.0


def test_differences_too_small_to_steer_by_are_worth_little_though_they_are_true() -> None:
    assert gain(3000, predicted=0.03, worth=1.0) < 0.1
    assert gain(3000, predicted=0.002, worth=1.0, noise=0.01) < 0.01


def test_a_placement_where_no_rank_is_nearer_is_worth_nothing() -> None:
    assert gain(1000, predicted=0.0, worth=1.0) == 0.0


def test_few_samples_are_worth_less_than_many() -> None:
    few, many = (
        np.mean([gain(count, predicted=0.12, worth=1.0, noise=0.1, seed=seed) for seed in range(10)])
        for count in (4, 400)
    )
    assert few < 0.5 * many


def test_a_prior_that_is_off_is_no_merit_of_the_prediction() -> None:
    """Every request gets the rank that looks best, so that all predicted differences have one sign, and the
    prior is 2 % too low.
    """
    random, calibration = np.random.default_rng(1), Calibration(1000)
    for _ in range(600):
        calibration.learn(0.3 + 0.1 + 0.03 * random.normal(), 0.3, 0.32 + 0.05 * random.normal(), 0.8)
    assert calibration.gain < 0.1


def steered(spread: float | None, count: int = 300, *, chosen: float = 0.03) -> float:
    """Return the gain of true predictions with small differences of chosen ranks and the given advantage of
    the nearest.
    """
    random, calibration = np.random.default_rng(3), Calibration(1000)
    for _ in range(count):
        difference = chosen * random.normal()
        calibration.learn(0.3 + difference, 0.3, 0.3 + difference + 0.02 * random.normal(), 0.8, spread)
    return calibration.gain


def test_what_steering_could_bring_counts_and_not_what_the_chosen_ranks_differ_by() -> None:
    assert steered(None) < 0.05
    assert steered(0.2) > 0.7, "nobody is sent home yet, but could be"
    assert steered(0.02, chosen=0.15) < 0.05, "no rank is nearer any more"


def test_a_new_placement_counts_after_some_dozens_of_requests() -> None:
    random, calibration = np.random.default_rng(4), Calibration(1000)
    for spread, count in ((0.03, 1000), (0.2, 60)):
        for _ in range(count):
            difference = spread / 2 * random.normal()
            calibration.learn(0.3 + difference, 0.3, 0.3 + difference + 0.03 * random.normal(), 0.8, spread)
    assert calibration.gain > 0.6


def by_cluster(worth: list[float], counts: list[int], seed: int = 0) -> Calibration:
    """Return the gains if requests are nine tenths of one cluster, and the given share of the prediction
    comes true.
    """
    random, calibration = np.random.default_rng(seed), Calibration(1000, len(worth))
    for cluster in random.permutation(np.repeat(np.arange(len(worth)), counts)):
        of = np.full(len(worth), 0.1 / len(worth), np.float32)
        of[cluster] += 0.9
        difference = 0.12 * random.normal()
        calibration.learn(
            0.3 + difference, 0.3, 0.3 + worth[cluster] * difference + 0.05 * random.normal(), 0.8, 0.2, of
        )
    return calibration


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_whose_predicted_locality_does_not_come_true_earns_nothing(seed: int) -> None:
    gains = by_cluster([1.0, 1.0, 1.0, 0.0], [100] * 4, seed).gains
    assert gains[:3].min() > 0.75
    assert gains[3] < 0.15


def test_a_cluster_of_which_little_was_seen_earns_what_all_do() -> None:
    calibration = by_cluster([1.0, 1.0, 0.0], [300, 300, 0])
    assert calibration.gains[2] == pytest.approx(calibration.gain, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_where_nothing_comes_true_no_cluster_earns_anything_by_chance(seed: int) -> None:
    assert by_cluster([0.0] * 8, [40] * 8, seed).gains.max() < 0.05


def test_gains_go_with_what_was_said_of_a_cluster_that_splits_or_merges() -> None:
    calibration = by_cluster([1.0, 0.0, 1.0], [200, 200, 0])
    calibration.move(1, 2, 0.5)
    assert calibration.gains[2] < 0.3
    calibration.move(1, 2, 1.0)
    assert calibration.gains[1] == pytest.approx(calibration.gain, abs=0.01), (
        "nothing is known of it any more"
    )


def test_what_was_good_and_no_longer_is_loses_its_worth() -> None:
    random, calibration = np.random.default_rng(2), Calibration(200)
    for worth in (1.0, 0.0):
        for _ in range(800):
            difference = 0.15 * random.normal()
            calibration.learn(0.5 + difference, 0.5, 0.5 + worth * difference + 0.03 * random.normal(), 0.8)
    assert calibration.gain < 0.1
    assert calibration.outcomes == 1600


def test_the_mass_of_the_popular_half_that_was_foreseen() -> None:
    counts = np.array([[10, 5, 3, 1], [0, 0, 2, 8]])
    assert recall(counts, np.array([[4, 3, 2, 1], [1, 2, 3, 4]])) == 1.0
    assert recall(counts, np.array([[4, 1, 2, 1], [4, 1, 2, 3]])) == (10 + 8) / (15 + 10)
    assert recall(np.zeros((2, 4)), np.ones((2, 4))) == 1.0


def test_recalls_are_means_over_samples() -> None:
    calibration = Calibration(1000)
    assert calibration.recall is None
    assert calibration.prior_recall is None
    counts, right, wrong = np.array([[9, 9, 1, 1]]), np.array([[4, 3, 2, 1]]), np.array([[1, 2, 3, 4]])
    calibration.sampled(counts, right, wrong)
    assert (calibration.recall, calibration.prior_recall) == (1.0, 0.0)
    calibration.sampled(counts, wrong, wrong)
    assert calibration.recall == pytest.approx(0.5, abs=0.01)


def test_a_restart_changes_nothing() -> None:
    calibration, again = Calibration(100, 2), Calibration(100, 2)
    calibration.learn(0.5, 0.3, 0.45, 0.7, 0.2, np.array([0.9, 0.1], np.float32))
    calibration.sampled(np.ones((1, 4)), np.ones((1, 4)), np.ones((1, 4)))
    again.take_over(calibration.state())
    assert again.state() == calibration.state()
    assert again.gain == calibration.gain
    assert again.gains.tolist() == calibration.gains.tolist()


@pytest.mark.parametrize(
    "broken", [{"sums": [1.0]}, {"recalls": [float("nan")] * 3}, {"spreads": [0.0]}, {"by_cluster": [1.0]}]
)
def test_a_state_that_does_not_fit_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration(100).take_over(Calibration(100).state() | broken)
