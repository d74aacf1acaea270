"""Excluded ranks and the time of their exclusion: breakers, outliers, drains. No exclusion lasts forever."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet.layout import tp
from router.config import RouterConfig
from router.fleet_state.reservations import Reservations
from router.fleet_state.target_table import RankKey, TargetTable
from router.fleet_state.view import FleetView
from router.health.circuit_breakers import DOUBLINGS, EJECTION_SECONDS, CircuitBreakers, ExclusionKind
from router.health.outliers import MIN_OBSERVATIONS
from tests.router.router_fixture import engine_joined

A, B, C, D = (1, 0), (1, 1), (2, 0), (2, 1)


def roster_of(*engines: int, **about: Any) -> TargetTable:
    """Return the table of a model served by engines with these numbers of ranks; their worker_ids are 1, 2,
    ...
    """
    view = FleetView(Reservations(settle_seconds=0.1, stale_seconds=5.0))
    for number, ranks in enumerate(engines, start=1):
        urls = [f"http://{number}.{rank}" for rank in range(ranks)]
        view.join(engine_joined(f"e{number}", urls, "tokens", worker_id=number, **about), 0.0)
        view.sign_of_life(number, 0.0)
    return view.target_table("demo")


@pytest.fixture
def table() -> TargetTable:
    return roster_of(2, 2)


class Person:
    """Sends requests to ranks and reports their outcomes."""

    def __init__(self, **config: Any) -> None:
        self.health = CircuitBreakers(RouterConfig(**config))
        self.count = 0

    def begin(self, rank: RankKey, now: float, predicted: float | None = 0.1) -> int:
        self.count += 1
        self.health.began(self.count, rank, predicted, now)
        return self.count

    def fail(self, rank: RankKey, times: int, now: float) -> list[bool]:
        return [self.health.failed(self.begin(rank, now), now) for _ in range(times)]

    def answer(self, rank: RankKey, now: float, took: float = 0.1) -> None:
        visit = self.begin(rank, now - took)
        self.health.first_token(visit, now)
        self.health.answered(visit, now)

    def kinds(self, table: TargetTable, now: float) -> dict[RankKey, str]:
        return {key: kind.value for key, kind in self.health.exclusions(table, now).kinds.items()}


def test_without_failures_no_rank_is_excluded(table: TargetTable) -> None:
    person = Person()
    person.answer(A, 1.0)
    assert person.health.exclusions(table, 1.0).every == {}


def test_a_breaker_opens_after_failures_in_a_row_and_is_half_open_after_its_time(table: TargetTable) -> None:
    person = Person(breaker_failures=3, breaker_seconds=2.0)
    assert person.fail(A, 2, 1.0) == [False, False]
    person.answer(A, 1.0)
    assert person.fail(A, 3, 1.0) == [False, False, True]
    exclusions = person.health.exclusions(table, 1.5)
    assert exclusions.every == {A: "its breaker is open: too many failures in a row; excluded for 2 s"}
    assert exclusions.hard == {}
    assert person.kinds(table, 3.0) == {}


def test_half_open_lets_exactly_one_request_through_at_a_time(table: TargetTable) -> None:
    person = Person(breaker_failures=1)
    person.fail(A, 1, 0.0)
    probe = person.begin(A, 1.0)
    assert "half open" in person.health.exclusions(table, 1.0).every[A]
    person.health.ended(probe)  # its client left: the state of the rank stays unknown
    assert person.kinds(table, 1.0) == {}
    probe = person.begin(A, 1.0)
    assert person.kinds(table, 1.0) == {A: "breaker"}
    person.health.answered(probe, 1.1)
    assert person.kinds(table, 1.1) == {}


def test_each_failed_probe_doubles_the_time_up_to_a_bound_and_an_answer_resets_it(
    table: TargetTable,
) -> None:
    person = Person(breaker_failures=1, breaker_seconds=1.0)
    now, times = 0.0, []
    for _ in range(DOUBLINGS + 3):
        person.fail(A, 1, now)
        opened = now
        while A in person.health.exclusions(table, now).every:
            now += 0.5
        times.append(now - opened)
    assert times == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]
    person.answer(A, now + 0.1)
    person.fail(A, 1, now + 1)
    assert A not in person.health.exclusions(table, now + 2.0).every


def test_a_first_token_closes_a_breaker_on_trial_only(table: TargetTable) -> None:
    person = Person(breaker_failures=4, breaker_seconds=1.0)
    person.fail(A, 4, 0.0)
    probe = person.begin(A, 1.0)
    person.health.first_token(probe, 1.1)
    assert person.kinds(table, 1.1) == {}
    assert person.health.failed(probe, 1.2)  # the stream broke after all
    assert person.kinds(table, 3.1) == {A: "breaker"}
    assert person.kinds(table, 3.3) == {}


def test_requests_from_before_the_breaker_opened_say_nothing_about_it(table: TargetTable) -> None:
    person = Person(breaker_failures=2, breaker_seconds=1.0)
    old = [person.begin(A, 0.0) for _ in range(10)]
    assert [person.health.failed(visit, 1.0) for visit in old[:6]] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    person.health.answered(old[6], 1.1)
    assert person.kinds(table, 1.5) == {A: "breaker"}
    person.health.answered(person.begin(A, 2.0), 2.1)
    assert [person.health.failed(visit, 3.0) for visit in old[7:]] == [False, False, False]
    assert person.kinds(table, 3.0) == {}


def test_a_probe_that_never_ends_does_not_block_the_rank(table: TargetTable) -> None:
    person = Person(breaker_failures=1, first_token_seconds=10.0)
    person.fail(A, 1, 0.0)
    person.begin(A, 1.0)
    assert person.kinds(table, 10.9) == {A: "breaker"}
    assert person.kinds(table, 11.0) == {}


def test_an_answer_while_breakers_are_ignored_closes_them(table: TargetTable) -> None:
    person = Person(breaker_failures=1, breaker_seconds=60.0)
    for rank in (A, B, C, D):
        person.fail(rank, 1, 0.0)
    assert len(person.kinds(table, 1.0)) == 4
    person.answer(B, 2.0)
    assert set(person.kinds(table, 2.0)) == {A, C, D}
    person.fail(A, 5, 3.0)  # still ignored: these failures change nothing
    assert person.kinds(table, 60.5) == {}


# Outliers


def answered(person: Person, ranks: dict[RankKey, float], now: float, times: int = MIN_OBSERVATIONS) -> None:
    for at in range(times):
        for rank, took in ranks.items():
            person.answer(rank, now + 0.01 * at, took)


def test_a_rank_much_slower_than_the_others_is_ejected_for_a_growing_time(table: TargetTable) -> None:
    person = Person(outlier_factor=4.0)
    now = 10.0
    for times in (1, 2, 3):
        answered(person, {A: 0.1, B: 0.12, C: 0.09, D: 1.0}, now)
        person.health.eject_outliers([[A, B, C, D]], now + 1)
        assert person.kinds(table, now + 1) == {D: "outlier"}
        now += 1 + times * EJECTION_SECONDS
        assert person.kinds(table, now - 0.1) == {D: "outlier"}
        assert person.kinds(table, now) == {}
        person.health.eject_outliers([[A, B, C, D]], now)


def test_slow_ranks_are_no_outliers_when_all_are_slow_or_slower_by_milliseconds(table: TargetTable) -> None:
    person = Person(outlier_factor=4.0)
    answered(person, {A: 5.0, B: 4.0, C: 9.0, D: 6.0}, 10.0)
    person.health.eject_outliers([[A, B, C, D]], 11.0)
    assert person.kinds(table, 11.0) == {}
    person = Person(outlier_factor=4.0)
    for _ in range(MIN_OBSERVATIONS):
        for rank, took in {A: 0.001, B: 0.001, C: 0.001, D: 0.02}.items():
            visit = person.begin(rank, 1.0, predicted=0.0005)
            person.health.first_token(visit, 1.0 + took)
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    assert person.kinds(table, 2.0) == {}


def test_what_is_slow_by_prediction_is_no_outlier(table: TargetTable) -> None:
    person = Person(outlier_factor=4.0)
    for _ in range(MIN_OBSERVATIONS):
        for rank, seconds in {A: 0.1, B: 0.1, C: 0.1, D: 3.0}.items():
            visit = person.begin(rank, 1.0, predicted=seconds)
            person.health.first_token(visit, 1.0 + 1.2 * seconds)
    person.health.eject_outliers([[A, B, C, D]], 4.0)
    assert person.kinds(table, 4.0) == {}


def test_requests_that_wait_in_vain_for_their_first_token_are_seen_before_they_time_out(
    table: TargetTable,
) -> None:
    person = Person(outlier_factor=4.0)
    answered(person, {A: 0.1, B: 0.1, C: 0.1}, 1.0)
    for _ in range(MIN_OBSERVATIONS):
        person.begin(D, 1.0)
    person.health.eject_outliers([[A, B, C, D]], 1.2)
    assert person.kinds(table, 1.2) == {}
    person.health.eject_outliers([[A, B, C, D]], 3.0)
    assert person.kinds(table, 3.0) == {D: "outlier"}


def test_requests_with_an_unknown_first_token_make_no_outlier(table: TargetTable) -> None:
    person = Person(outlier_factor=4.0)
    answered(person, {A: 0.1, B: 0.1, C: 0.1}, 1.0)
    for _ in range(2 * MIN_OBSERVATIONS):
        visit = person.begin(D, 1.0)
        person.health.untimed(visit)
    person.health.eject_outliers([[A, B, C, D]], 9.0)
    person.health.first_token(visit, 9.0)
    assert person.kinds(table, 9.0) == {}


def test_too_few_observations_eject_no_rank(table: TargetTable) -> None:
    person = Person(outlier_factor=2.0)
    answered(person, {A: 0.1, B: 0.1, C: 0.1}, 1.0)
    answered(person, {D: 9.0}, 1.0, MIN_OBSERVATIONS - 1)
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    assert person.kinds(table, 2.0) == {}


def test_a_rank_that_fails_far_more_often_than_the_others_is_ejected(table: TargetTable) -> None:
    person = Person(breaker_failures=100)
    answered(person, {A: 0.1, B: 0.1, C: 0.1, D: 0.1}, 1.0, 5)
    person.fail(D, 8, 1.0)
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    assert person.kinds(table, 2.0) == {D: "outlier"}


def test_ranks_that_all_fail_now_and_then_are_no_outliers(table: TargetTable) -> None:
    person = Person(breaker_failures=100)
    for number in range(40):
        for rank in (A, B, C, D):
            if (number + rank[0]) % 10 < 2:
                person.fail(rank, 1, 1.0)
            else:
                person.answer(rank, 1.0)
    person.fail(D, 3, 1.0)
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    assert person.kinds(table, 2.0) == {}


def test_at_most_a_share_of_the_ranks_is_ejected_and_the_worst_come_first(table: TargetTable) -> None:
    person = Person(outlier_factor=2.0, max_ejected_share=0.3)
    answered(person, {A: 0.1, B: 0.1, C: 2.0, D: 9.0}, 1.0)
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    assert person.kinds(table, 2.0) == {D: "outlier"}
    answered(person, {A: 0.1, B: 0.1, C: 2.0}, 3.0)
    person.health.eject_outliers([[A, B, C, D]], 4.0)
    assert person.kinds(table, 4.0) == {D: "outlier"}
    person.health.eject_outliers([[A, B, D]], 5.0)  # one rank has left: none of three may be ejected
    assert person.kinds(table, 5.0) == {}


def test_a_factor_of_zero_ejects_no_rank(table: TargetTable) -> None:
    person = Person(outlier_factor=4.0)
    answered(person, {A: 0.1, B: 0.1, C: 0.1, D: 9.0}, 1.0)
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    assert person.kinds(table, 2.0) == {D: "outlier"}
    person.health.reconfigure(RouterConfig(outlier_factor=0.0))
    assert person.kinds(table, 2.1) == {}
    answered(person, {A: 0.1, B: 0.1, C: 0.1, D: 9.0}, 3.0)
    person.health.eject_outliers([[A, B, C, D]], 4.0)
    assert person.kinds(table, 4.0) == {}


# Drains


def test_drains_hold_for_a_rank_or_an_engine_of_one_incarnation(table: TargetTable) -> None:
    health = CircuitBreakers(RouterConfig())
    health.drain(1, 1, "new disk")
    health.drain(2, None, "")
    health.drain(9, None, "an incarnation that is gone")
    assert health.exclusions(table, 0.0).hard == {B: "draining: new disk", C: "draining", D: "draining"}
    health.undrain(2, None)
    health.undrain(1, 0)
    assert health.exclusions(table, 0.0).every == {B: "draining: new disk"}
    health.drain(1, 0, "very " * 1000)
    assert len(health.exclusions(table, 0.0).every[A]) < 250
    health.undrain(1, 0)
    health.undrain(1, 1)
    health.undrain(9, None)
    assert health.exclusions(table, 0.0).every == {}


def test_a_drained_engine_that_is_one_target_is_one_bar() -> None:
    table = roster_of(2, 1, layout=tp(2))
    health = CircuitBreakers(RouterConfig())
    health.drain(1, None, "")
    assert set(health.exclusions(table, 0.0).hard) == {A}


def test_a_forgotten_incarnation_leaves_nothing_behind(table: TargetTable) -> None:
    person = Person(breaker_failures=1, outlier_factor=4.0)
    person.fail(A, 1, 1.0)
    answered(person, {A: 9.0, C: 0.1, D: 0.1}, 1.0)
    late = person.begin(B, 1.0)
    person.health.drain(1, None, "")
    person.health.eject_outliers([[A, B, C, D]], 2.0)
    person.health.forget_worker(1)
    assert person.health.exclusions(table, 2.0).every == {}
    person.health.answered(late, 3.0)
    person.health.eject_outliers([[A, B, C, D]], 4.0)
    assert person.health.exclusions(table, 4.0).every == {}


class Course(RuleBasedStateMachine):
    """Any sequence of requests, failures, waits and judgements, compared with an independent record of what
    may and must not be excluded.
    """

    ranks: Sequence[RankKey] = (A, B, C, D)

    @initialize(share=st.sampled_from([0.0, 0.25, 0.5, 1.0]), failures=st.integers(1, 3))
    def begin(self, share: float, failures: int) -> None:
        self.person = Person(
            max_ejected_share=share,
            breaker_failures=failures,
            breaker_seconds=1.0,
            outlier_factor=2.0,
            first_token_seconds=20.0,
        )
        self.health = self.person.health
        self.table = roster_of(2, 2)
        self.share = share
        self.now = 0.0
        self.open: dict[int, RankKey] = {}
        self.through: dict[RankKey, int] = {}
        """the request that was let through to a half-open rank and has no outcome yet"""

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        rank=st.sampled_from([A, B, C, D]),
        times=st.integers(1, 12),
        predicted=st.sampled_from([0.1, 1.0, None]),
    )
    def ask(self, rank: RankKey, times: int, predicted: float | None) -> None:
        for _ in range(times):
            if rank not in self.health.exclusions(self.table, self.now).every:
                self.open[self.person.begin(rank, self.now, predicted)] = rank

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        how=st.sampled_from(["token", "answered", "failed", "ended"]),
        times=st.integers(1, 10),
    )
    def hear(self, data: st.DataObject, how: str, times: int) -> None:
        for _ in range(min(times, len(self.open))):
            visit = data.draw(st.sampled_from(sorted(self.open)))
            if how == "token":
                self.health.first_token(visit, self.now)
                continue
            del self.open[visit]
            if how == "ended":
                self.health.ended(visit)
            else:
                (self.health.answered if how == "answered" else self.health.failed)(visit, self.now)

    @rule()
    def judge(self) -> None:
        self.health.eject_outliers([self.ranks], self.now)

    @precondition(lambda self: not self.health.exclusions(self.table, self.now).every.keys() - {A})
    @rule()
    def a_half_open_rank_takes_one(self) -> None:
        for rank in self.ranks:
            self.person.fail(rank, 12, self.now)
        self.now += 2.0**DOUBLINGS + 0.1
        for rank in self.ranks:
            if self.health.exclusions(self.table, self.now).kinds.get(rank) is ExclusionKind.OUTLIER:
                continue
            assert rank not in self.health.exclusions(self.table, self.now).every
            probe = self.person.begin(rank, self.now)
            assert rank in self.health.exclusions(self.table, self.now).every
            self.health.ended(probe)
            assert rank not in self.health.exclusions(self.table, self.now).every

    @rule()
    def whoever_behaves_comes_back(self) -> None:
        for visit in list(self.open):
            self.health.ended(visit)
        self.open.clear()
        for _ in range(60):  # a minute and a half of good answers from every allowed rank
            self.now += 2.0
            self.health.eject_outliers([self.ranks], self.now)
            excluded = self.health.exclusions(self.table, self.now).every
            for rank in self.ranks:
                if rank not in excluded:
                    self.person.answer(rank, self.now)
        assert self.health.exclusions(self.table, self.now).every == {}

    @invariant()
    def the_share_holds(self) -> None:
        kinds = self.health.exclusions(self.table, self.now).kinds
        assert sum(kind is ExclusionKind.OUTLIER for kind in kinds.values()) <= self.share * len(self.ranks)


TestAnyCourse = Course.TestCase
TestAnyCourse.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
