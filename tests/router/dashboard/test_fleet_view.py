"""The view *Fleet* from a router's state: figures and what is called wrong."""

import pytest

from fleet.facts.engines import EngineJoined
from router.config import RouterConfig
from router.dashboard.views.fleet import MOST_PROBLEMS, FleetPicture, ModelNow, RouterNow, fleet_picture
from router.scheduling.scheduler import Scheduler
from tests.router.router_fixture import engine_joined

NOW = 100.0
WELL = RouterNow(
    tag="r", ready=True, missing=[], bus_silent=False, stopping=False, in_flight=0, waiting=0, models=["demo"]
)


class Fleet:
    """A scheduler's state, changed by a test."""

    def __init__(self, **settings: float) -> None:
        self.scheduler = Scheduler.create(RouterConfig(**settings))  # type: ignore[arg-type]

    def join(self, engine: str, ranks: int = 2, *, live: bool = True, worker_id: int = 0) -> EngineJoined:
        urls = [f"http://h:{rank}" for rank in range(ranks)]
        joined = engine_joined(engine, urls, None, worker_id=worker_id)
        self.scheduler.view.join(joined, NOW)
        if live:
            self.scheduler.view.sign_of_life(joined.worker_id, NOW)
        return joined

    def picture(self, router: RouterNow = WELL, now: float = NOW, **unheard: str) -> FleetPicture:
        scheduler = self.scheduler
        table = scheduler.view.target_table("demo")
        load = scheduler.reservations.load(table.rows, now)
        stale = {target.key for target in table.targets if scheduler.reservations.is_stale(target.key, now)}
        model = ModelNow(
            table=table,
            load=load,
            saturated=scheduler.saturated(table, load, now),
            exclusions=scheduler.health.exclusions(table, now),
            stale=frozenset(stale),
        )
        return fleet_picture(router, scheduler.view.engines(), {"demo": model}, unheard)


def lines(picture: FleetPicture) -> list[tuple[str, str, str | None, tuple[int, ...]]]:
    return [(one.severity, one.what, one.engine, one.ranks) for one in picture.problems]


def test_load_is_shown_per_rank_and_summed() -> None:
    fleet = Fleet()
    first, second = fleet.join("a"), fleet.join("b")
    fleet.scheduler.reservations.report((first.worker_id, 1), (30, 2, 500, 7), NOW)
    fleet.scheduler.reservations.report((second.worker_id, 0), (5, 1, 100, 3), NOW)
    picture = fleet.picture()
    a, b = picture.engines
    assert (a.ranks.requests, a.ranks.prefill_tokens, a.ranks.blocks) == ([0, 2], [0, 30], [0, 500])
    assert (b.ranks.requests, b.ranks.steps) == ([1, 0], [3, 0])
    totals = picture.totals
    assert (totals.requests, totals.prefill_tokens, totals.blocks, totals.kv_blocks) == (3, 35, 600, 4000)
    assert totals.kv_share == pytest.approx(0.15)
    assert (totals.live_engines, totals.live_ranks, picture.problems) == (2, 4, [])


def test_a_drained_rank_is_a_note_with_the_operators_reason() -> None:
    fleet = Fleet()
    joined = fleet.join("a")
    fleet.scheduler.health.drain(joined.worker_id, 1, "new power supply")
    picture = fleet.picture()
    assert picture.engines[0].ranks.state == ["live", "drain"]
    assert lines(picture) == [("info", "drained by an operator", "a", (1,))]
    assert picture.problems[0].reason == "new power supply"


def test_ranks_with_the_same_fault_are_one_line() -> None:
    fleet = Fleet(max_requests_per_rank=1)
    joined = fleet.join("a", 4)
    for rank in (0, 2):
        fleet.scheduler.reservations.report((joined.worker_id, rank), (0, 1, 4, 1), NOW)
    picture = fleet.picture()
    assert picture.engines[0].ranks.state == ["saturated", "live", "saturated", "live"]
    assert [one[2:] for one in lines(picture)] == [("a", (0, 2))]
    assert picture.totals.live_ranks == 2


def test_a_rank_whose_reports_stop_is_stale_and_one_that_never_reported_is_not() -> None:
    fleet = Fleet(stale_load_seconds=5.0)
    joined = fleet.join("a")
    fleet.scheduler.reservations.report((joined.worker_id, 0), (0, 1, 4, 1), NOW)
    assert fleet.picture(now=NOW + 4).engines[0].ranks.state == ["live", "live"]
    assert fleet.picture(now=NOW + 6).engines[0].ranks.state == ["stale", "live"]


def test_an_engine_without_requests_says_why_and_the_gravest_comes_first() -> None:
    fleet = Fleet()
    fleet.join("a", live=False)
    moving, gone = fleet.join("b"), fleet.join("c")
    fleet.scheduler.view.handing_over(moving.worker_id, 0.25)
    fleet.scheduler.view.unreachable(gone.worker_id)
    picture = fleet.picture()
    assert [(one.severity, one.engine) for one in picture.problems] == [
        ("critical", "c"),
        ("info", "a"),
        ("info", "b"),
    ]
    assert "unreachable" in picture.problems[0].reason
    assert "250 ms" in picture.problems[2].reason
    assert picture.engines[2].ranks.state == ["down", "down"]
    assert picture.totals.live_engines == 1


def test_the_routers_own_state_comes_before_all() -> None:
    silent = RouterNow(
        tag="r",
        ready=False,
        missing=["the planner"],
        bus_silent=True,
        stopping=False,
        in_flight=3,
        waiting=2,
        models=[],
    )
    picture = Fleet().picture(silent, slow="http://s")
    assert [one.severity for one in picture.problems] == ["critical"] * 3 + ["warning"]
    assert "the planner" in picture.problems[0].reason
    assert ("critical", "static backend has not answered yet", "slow", ()) in lines(picture)
    assert picture.problems[3].what == "2 requests wait for a place"


def test_many_problems_are_cut_and_counted() -> None:
    fleet = Fleet()
    for number in range(MOST_PROBLEMS + 5):
        joined = fleet.join(f"engine-{number}", 1, worker_id=number + 1)
        fleet.scheduler.view.handing_over(joined.worker_id, 1.0)
    picture = fleet.picture()
    assert (len(picture.problems), picture.more_problems) == (MOST_PROBLEMS, 5)
