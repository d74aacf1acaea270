"""Decayed counts and exposure against the defining integrals, computed per report in double precision."""

from math import exp
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracker.activity.decay_window import BATCH, FAST, PATIENCE, SLOW, DecayWindow, WindowReport
from tracker.activity.report_gaps import MAX_OPEN, ReportGaps

FAST_SECONDS, SLOW_SECONDS = 20.0, 900.0
CONSTANTS = (FAST_SECONDS, SLOW_SECONDS)
LAYERS, EXPERTS = 2, 3


class Told(NamedTuple):
    """A report from a publisher: its number, its arrival time and its content."""

    sequence: int
    end: float
    seconds: float
    tokens: int
    counts: tuple[int, ...]

    @property
    def table(self) -> np.ndarray:
        return np.array(self.counts, np.float32).reshape(LAYERS, EXPERTS)


def window() -> DecayWindow:
    return DecayWindow(LAYERS, EXPERTS, CONSTANTS)


def ones(scale: float = 1.0) -> np.ndarray:
    return np.full((LAYERS, EXPERTS), scale)


def hear(window: DecayWindow, gaps: ReportGaps, report: Told) -> None:
    """Process one report as the tracker does."""
    for span in gaps.observe(report.sequence, report.end - report.seconds, report.end):
        window.lose(span.start, span.end, recovered=span.recovered)
    window.observe(WindowReport(report.table, report.tokens, report.seconds, report.end))


def weight(constant: float, start: float, end: float, now: float) -> float:
    """Integral of exp(-age / constant) over start..end."""
    return constant * (exp(-(now - end) / constant) - exp(-(now - start) / constant)) if end > start else 0.0


class Oracle:
    """Sums over all reports at every evaluation; no state is kept in between."""

    def __init__(self, reports: list[Told], constant: float, sources: int = 1) -> None:
        self.reports = sorted(set(reports))
        self.constant = constant
        self.sources = sources

    def counts(self, now: float) -> np.ndarray:
        return sum(
            (self._density(report, now) * report.table.astype(np.float64) for report in self.reports),
            np.zeros((LAYERS, EXPERTS)),
        )

    def tokens(self, now: float) -> float:
        return sum(self._density(report, now) * report.tokens for report in self.reports)

    def _density(self, report: Told, now: float) -> float:
        return weight(self.constant, report.end - report.seconds, report.end, now) / report.seconds

    def exposure(self, now: float) -> float:
        began = min(report.end - report.seconds for report in self.reports)
        pairs = zip(self.reports, self.reports[1:], strict=False)
        lost = sum(
            weight(self.constant, a.end, b.end - b.seconds, now)
            for a, b in pairs
            if b.sequence > a.sequence + 1
        )
        own = sum(
            weight(self.constant, report.end - report.seconds, report.end, now) for report in self.reports
        )
        return max(weight(self.constant, began, now, now) - lost / self.sources, own / self.sources)

    def judged(self, now: float) -> float:
        end, seconds = max((report.end, report.seconds) for report in self.reports)
        return end + max(0.0, now - end - PATIENCE * seconds)


reports = st.lists(
    st.builds(
        Told,
        st.integers(0, 40),
        st.floats(0.0, 300.0),
        st.floats(0.05, 30.0),
        st.integers(0, 1000),
        st.tuples(*[st.integers(0, 60000)] * (LAYERS * EXPERTS)),
    ),
    min_size=1,
    max_size=15,
    unique_by=lambda report: report.sequence,
)


def test_an_empty_window_says_nothing() -> None:
    empty = window()
    for level in (FAST, SLOW):
        assert not empty.rates(level, 1e6).any()
        assert empty.tokens_per_second(level, 1e6) == 0.0
        assert not empty.counts(level, 0.0).any()


@given(reports, st.floats(0.0, 100.0), st.randoms())
def test_any_order_of_reports_gives_what_the_integrals_over_them_give(
    told: list[Told], later: float, random: object
) -> None:
    shuffled = list(told)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    received, gaps = window(), ReportGaps()
    for report in shuffled:
        hear(received, gaps, report)
    now = max(report.end for report in told) + later
    for level, constant in ((FAST, FAST_SECONDS), (SLOW, SLOW_SECONDS)):
        oracle = Oracle(told, constant)
        np.testing.assert_allclose(received.counts(level, now), oracle.counts(now), rtol=2e-5, atol=1e-6)
        assert received.tokens(level, now) == pytest.approx(oracle.tokens(now), rel=1e-6, abs=1e-9)
        judged = oracle.judged(now)
        exposure = oracle.exposure(judged)
        np.testing.assert_allclose(
            received.rates(level, now), oracle.counts(judged) / exposure, rtol=1e-4, atol=1e-6
        )
        assert received.tokens_per_second(level, now) == pytest.approx(
            oracle.tokens(judged) / exposure, rel=1e-4, abs=1e-9
        )


@given(
    st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(1, 4)), min_size=1, max_size=10), st.floats(0.1, 1e4)
)
def test_how_time_is_cut_into_reports_changes_nothing(
    intervals: list[tuple[float, int]], rate: float
) -> None:
    whole, cut, now = window(), window(), 0.0
    for seconds, pieces in intervals:
        for piece in range(1, pieces + 1):
            part = seconds / pieces
            cut.observe(WindowReport(ones(rate * part), rate * part, part, now + piece * part))
        now += seconds
        whole.observe(WindowReport(ones(rate * seconds), rate * seconds, seconds, now))
    for level in (FAST, SLOW):
        np.testing.assert_allclose(cut.counts(level, now + 5.0), whole.counts(level, now + 5.0), rtol=1e-5)
        assert cut.tokens_per_second(level, now) == pytest.approx(
            whole.tokens_per_second(level, now), rel=1e-6
        )


@given(st.lists(st.floats(0.01, 500.0), min_size=1, max_size=30), st.floats(0.01, 1e6))
def test_a_constant_rate_is_estimated_exactly_whatever_the_intervals(
    lengths: list[float], rate: float
) -> None:
    received, now = window(), 1000.0
    for seconds in lengths:
        now += seconds
        received.observe(WindowReport(ones(3 * rate * seconds), rate * seconds, seconds, now))
        for level in (FAST, SLOW):
            np.testing.assert_allclose(received.rates(level, now), 3 * rate, rtol=1e-5)
            assert received.tokens_per_second(level, now) == pytest.approx(rate, rel=1e-6)


def test_a_silent_rank_decays_under_both_time_constants() -> None:
    received = window()
    for now in range(1, 2001):
        received.observe(WindowReport(ones(10.0), 10.0, 1.0, float(now)))
    for level, constant in ((FAST, FAST_SECONDS), (SLOW, SLOW_SECONDS)):
        assert received.tokens_per_second(level, 2000.0) == pytest.approx(10.0, rel=1e-6)
        assert received.tokens_per_second(level, 2002.0) == pytest.approx(10.0, rel=1e-6), (
            "the next report may still come"
        )
        assert received.tokens_per_second(level, 2002.0 + constant) == pytest.approx(
            10.0
            * (np.exp(-1.0) - np.exp(-2000.0 / constant - 1.0))
            / (1.0 - np.exp(-2000.0 / constant - 1.0)),
            rel=1e-6,
        )
        assert received.rates(level, 2000.0 + 20 * constant).max() < 1e-6


def test_a_rank_that_idles_and_comes_back_was_silent_meanwhile() -> None:
    received, gaps = window(), ReportGaps()
    for sequence, end in enumerate((1.0, 61.0)):
        hear(received, gaps, Told(sequence, end, 1.0, 10, (10,) * 6))
    assert received.tokens_per_second(FAST, 61.0) == pytest.approx(
        10.0 * (1 - exp(-1 / 20)) * (1 + exp(-3)) / (1 - exp(-61 / 20)), rel=1e-6
    )


def test_time_whose_reports_were_lost_is_not_taken_for_silence() -> None:
    received, gaps = window(), ReportGaps()
    for sequence, end in ((0, 1.0), (30, 31.0)):
        hear(received, gaps, Told(sequence, end, 1.0, 10, (10,) * 6))
    assert received.tokens_per_second(FAST, 31.0) == pytest.approx(10.0, rel=1e-6)


def test_a_burst_of_delayed_reports_stands_for_the_time_they_took() -> None:
    received, gaps = window(), ReportGaps()
    for sequence in range(10):
        hear(received, gaps, Told(sequence, 100.0, 1.0, 10, (10,) * 6))
    assert received.tokens_per_second(FAST, 100.0) == pytest.approx(10.0, rel=1e-6)


def test_counts_of_several_publishers_of_one_rank_add_up() -> None:
    received = window()
    for now in range(1, 101):
        for rate in (10.0, 30.0):
            received.observe(WindowReport(ones(rate), rate, 1.0, float(now)))
    received.sources = 2
    assert received.tokens_per_second(FAST, 100.0) == pytest.approx(40.0, rel=1e-6)
    np.testing.assert_allclose(received.rates(SLOW, 100.0), 40.0, rtol=1e-5)


def test_counts_without_an_interval_enter_one_profile_and_no_rate() -> None:
    received = window()
    received.observe(WindowReport(ones(10.0), 10.0, 1.0, 1.0))
    before = received.counts(FAST, 1.0)
    received.take(ones(500.0), 500.0, 1.0, SLOW)
    np.testing.assert_array_equal(received.counts(FAST, 1.0), before)
    np.testing.assert_allclose(received.counts(SLOW, 1.0), 510.0, rtol=1e-3)
    assert received.tokens(SLOW, 1.0) == pytest.approx(510.0, rel=1e-3)


def test_sums_stay_exact_when_the_reference_moves() -> None:
    received = window()
    for now in range(1, 5001):
        received.observe(WindowReport(ones(7.0), 7.0, 1.0, float(now)))
    np.testing.assert_allclose(received.counts(FAST, 5000.0), 7.0 * FAST_SECONDS, rtol=1e-4)
    np.testing.assert_allclose(
        received.counts(SLOW, 5000.0), 7.0 * SLOW_SECONDS * (1 - exp(-5000 / SLOW_SECONDS)), rtol=1e-4
    )


@given(st.floats(-1e9, 1e9), st.floats(-1e5, 1e5), st.floats(-100, 100))
def test_a_clock_that_seems_to_go_back_changes_nothing_for_the_worse(
    start: float, jump: float, look: float
) -> None:
    received = window()
    received.observe(WindowReport(ones(5.0), 5, 1.0, start))
    received.observe(WindowReport(ones(5.0), 5, 1.0, start + jump))
    for level in (FAST, SLOW):
        rates = received.rates(level, start + look)
        assert np.isfinite(rates).all()
        assert rates.min() >= 0


def test_512_ranks_of_58_x_256_fit_in_a_gigabyte() -> None:
    one, most = DecayWindow(58, 256, CONSTANTS), 0
    for now in range(3 * BATCH):
        one.observe(WindowReport(np.full((58, 256), 300, np.uint16), 10, 1.0, float(now)))
        most = max(most, one.stored_bytes)
    assert one.stored_bytes == 2 * 58 * 256 * 4
    assert 512 * one.stored_bytes == 60_817_408  # 61 MB at rest
    assert 512 * most == 167_247_872  # 167 MB when every rank has reports waiting to be accumulated


@given(reports, st.floats(0.0, 50.0), st.randoms())
def test_a_restored_window_says_what_the_saved_one_would_have_said(
    told: list[Told], later: float, random: object
) -> None:
    half = len(told) // 2
    plain, saved, plain_gaps, saved_gaps = window(), window(), ReportGaps(), ReportGaps()
    for report in told[:half]:
        hear(plain, plain_gaps, report)
        hear(saved, saved_gaps, report)
    saved, saved_gaps = DecayWindow.restore(CONSTANTS, saved.state()), ReportGaps.restore(saved_gaps.state())
    for report in told[half:]:
        hear(plain, plain_gaps, report)
        hear(saved, saved_gaps, report)
    now = max(report.end for report in told) + later
    for level in (FAST, SLOW):
        np.testing.assert_allclose(saved.rates(level, now), plain.rates(level, now), rtol=1e-6)
        assert saved.tokens(level, now) == pytest.approx(plain.tokens(level, now), rel=1e-9)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"shape": [2, 3]},
        {**DecayWindow(1, 1, CONSTANTS).state(), "shape": [2, 2]},
        {**DecayWindow(1, 1, CONSTANTS).state(), "sums": []},
    ],
)
def test_what_is_no_state_of_a_window_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no state of a window"):
        DecayWindow.restore(CONSTANTS, state)


@given(reports)
def test_a_window_restored_at_once_says_exactly_what_the_saved_one_says(told: list[Told]) -> None:
    saved, gaps = window(), ReportGaps()
    for report in told:
        hear(saved, gaps, report)
    restored, now = DecayWindow.restore(CONSTANTS, saved.state()), max(report.end for report in told)
    for level in (FAST, SLOW):
        np.testing.assert_array_equal(restored.rates(level, now), saved.rates(level, now))
        assert restored.tokens_per_second(level, now) == saved.tokens_per_second(level, now)


def test_gaps_are_bounded_and_the_oldest_stay_as_they_are() -> None:
    gaps = ReportGaps()
    for sequence in range(0, 4 * MAX_OPEN, 2):
        list(gaps.observe(sequence, sequence - 1.0, float(sequence)))
    assert list(gaps.observe(1, 0.0, 1.0)) == []
    assert len(list(gaps.observe(4 * MAX_OPEN - 3, 0.0, 1.0))) == 1


@pytest.mark.parametrize("state", [[], [None, None, []], [[1], [2, 3.0], []], [None, [1, 2.0], [[1]]]])
def test_what_is_no_state_of_gaps_is_refused(state: list[object]) -> None:
    with pytest.raises(ValueError, match="no state of gaps"):
        ReportGaps.restore(state)
