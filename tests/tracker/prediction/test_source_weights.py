"""Weights of the prediction sources, learnt from outcomes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.prediction import PATTERNS, PREFIX, SESSION, SOURCES, TENANT, TOKENS, SourceEvidence, pattern
from tracker.prediction.source_weights import MAX_WEIGHT, SourceWeights

K = 8
SHARES = np.full(K, 1 / K, np.float32)
LOG_SHARES = np.log(SHARES)


def known(**said: NDArray[Any]) -> SourceEvidence:
    """Return evidence of the named sources about a request: ratios [K]."""
    ratios, evidence = np.zeros((len(SOURCES), K), np.float32), [0.0] * len(SOURCES)
    for source, ratio in said.items():
        ratios[SOURCES.index(source)] = ratio
        evidence[SOURCES.index(source)] = 100.0
    return SourceEvidence(ratios, tuple(evidence), 0, 0, slice(0, 0))


def predicted(logits: NDArray[Any]) -> NDArray[np.float32]:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), np.float32)


def cross_entropy(weights: NDArray[Any], outcomes: list[tuple[SourceEvidence, NDArray[np.float32]]]) -> float:
    return -float(
        np.mean([np.log(predicted(LOG_SHARES + weights @ said.ratios)) @ seen for said, seen in outcomes])
    )


def test_a_source_is_trusted_as_far_as_it_is_right() -> None:
    random, trust = np.random.default_rng(0), SourceWeights(1000)
    for _ in range(1500):
        truth, other = random.normal(size=(2, K))
        trust.learn(
            LOG_SHARES,
            known(prefix=truth / 1.5, session=2 * truth, tenant=other),
            predicted(LOG_SHARES + truth),
            1.0,
        )
        trust.learn(LOG_SHARES, known(tokens=2.5 * truth), predicted(LOG_SHARES + truth), 1.0)
    table = trust.table
    together = known(prefix=np.ones(K), session=np.ones(K), tenant=np.ones(K))
    row = table[pattern(together.evidence)]
    assert row[PREFIX] / 1.5 + 2 * row[SESSION] == pytest.approx(1.0, abs=0.03), (
        "what two say alike is believed once"
    )
    assert abs(row[TENANT]) < 0.03, "what has nothing to do with it is not believed"
    assert table[1 << TOKENS, TOKENS] == pytest.approx(0.4, abs=0.03), "what exaggerates is believed less"
    assert trust.reliability[[PREFIX, SESSION, TOKENS]] == pytest.approx(1.0, abs=0.06)
    assert trust.reliability[TENANT] < 0.05
    assert trust.spoken == (1500, 1500, 1500, 1500)


def test_the_trusts_are_those_that_the_outcomes_call_for() -> None:
    random, trust = np.random.default_rng(1), SourceWeights(1e6)
    outcomes = []
    for _ in range(800):
        truth, noise = random.normal(size=K), random.normal(size=(2, K))
        said = known(prefix=truth + noise[0], session=truth + 0.5 * noise[1] + 0.5 * noise[0])
        outcomes.append((said, predicted(LOG_SHARES + 1.2 * truth)))
        trust.learn(LOG_SHARES, *outcomes[-1], 1.0)
    found = trust.table[3].astype(float)
    best = min(
        ((a, b) for a in np.linspace(0, 1.5, 21) for b in np.linspace(0, 1.5, 21)),
        key=lambda t: cross_entropy(np.array([*t, 0, 0]), outcomes[::16]),
    )
    assert cross_entropy(found, outcomes) < cross_entropy(np.array([*best, 0, 0]), outcomes) + 0.01


def test_a_source_that_speaks_alone_is_believed_more_than_in_company() -> None:
    random, trust = np.random.default_rng(2), SourceWeights(1000)
    for _ in range(500):
        truth = random.normal(size=K)
        said = truth + 0.3 * random.normal(size=K)
        trust.learn(
            LOG_SHARES,
            known(session=said, tokens=said + 0.1 * random.normal(size=K)),
            predicted(LOG_SHARES + truth),
            1.0,
        )
        trust.learn(LOG_SHARES, known(tokens=said), predicted(LOG_SHARES + truth), 1.0)
    assert trust.table[1 << TOKENS, TOKENS] > trust.table[1 << TOKENS | 1 << SESSION, TOKENS] + 0.1


def test_overconfidence_that_is_wrong_is_unlearnt_without_overshooting() -> None:
    trust, truth = SourceWeights(1000), np.zeros(K)
    truth[0] = 3.0
    for at in range(200):
        wrong = np.zeros(K)
        wrong[1 + at % (K - 1)] = 60.0
        trust.learn(LOG_SHARES, known(prefix=wrong), predicted(LOG_SHARES + truth), 1.0)
    assert trust.table.min() >= 0.0
    assert trust.table.max() <= MAX_WEIGHT
    assert trust.table[1, PREFIX] < 0.05
    assert trust.reliability[PREFIX] < 0.05


def test_outcomes_of_long_ago_are_forgotten() -> None:
    random, trust = np.random.default_rng(3), SourceWeights(100)
    for scale in (1.0, 4.0):
        for _ in range(600):
            truth = random.normal(size=K)
            trust.learn(LOG_SHARES, known(tokens=scale * truth), predicted(LOG_SHARES + truth), 1.0)
    assert trust.table[1 << TOKENS, TOKENS] == pytest.approx(0.25, abs=0.05)


def test_silence_teaches_nothing_and_few_outcomes_little() -> None:
    trust = SourceWeights(1000)
    before = trust.state()
    trust.learn(LOG_SHARES, known(), predicted(LOG_SHARES), 1.0)
    assert trust.state() == before
    truth = np.arange(K) / 4
    trust.learn(LOG_SHARES, known(prefix=truth), predicted(LOG_SHARES + truth), 1.0)
    assert trust.reliability[PREFIX] < 0.05
    assert trust.table.shape == (PATTERNS, len(SOURCES))


def test_clusters_without_a_share_do_not_matter() -> None:
    trust = SourceWeights(1000)
    shares = np.array([0.5, 0.5, 0, 0, 0, 0, 0, 0], np.float32)
    with np.errstate(divide="ignore"):
        logs = np.log(shares)
    for _ in range(50):
        trust.learn(
            logs,
            known(prefix=np.array([1.0, -1.0, 0, 0, 0, 0, 0, 0])),
            np.array([0.9, 0.1, 0, 0, 0, 0, 0, 0], np.float32),
            1.0,
        )
    assert np.isfinite(trust.table).all()
    assert trust.reliability[PREFIX] > 0.4


def test_a_restart_changes_nothing() -> None:
    random, trust = np.random.default_rng(4), SourceWeights(1000)
    for _ in range(50):
        truth = random.normal(size=K)
        trust.learn(LOG_SHARES, known(prefix=truth, tokens=3 * truth), predicted(LOG_SHARES + truth), 1.0)
    again = SourceWeights(1000)
    again.take_over(trust.state())
    assert again.state() == trust.state()
    for one in (again, trust):
        one.learn(LOG_SHARES, known(prefix=np.arange(K)), predicted(LOG_SHARES + np.arange(K)), 1.0)
    assert again.state() == trust.state()


@pytest.mark.parametrize("broken", [{"pull": b""}, {"spoken": [1]}, {"alone": np.full(4, np.nan).tobytes()}])
def test_a_state_that_does_not_fit_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="source weights"):
        SourceWeights(1000).take_over(SourceWeights(1000).state() | broken)
