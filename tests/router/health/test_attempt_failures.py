"""The ranks that the next attempt of a request avoids."""

from router.fleet_state.reservations import Reservations
from router.fleet_state.view import FleetView
from router.health.attempt_failures import AttemptFailure, ranks_to_avoid
from tests.router.router_fixture import engine_joined


def test_the_ranks_to_avoid_depend_on_how_they_failed() -> None:
    view = FleetView(Reservations(settle_seconds=1, stale_seconds=1))
    for worker in (1, 2):
        view.join(engine_joined(f"e{worker}", ["http://h:1", "http://h:2"], "f" * 64, worker_id=worker), 0.0)
        view.sign_of_life(worker, 0.0)
    table = view.target_table("demo")
    assert ranks_to_avoid([], table) == [frozenset()]
    broken = ranks_to_avoid([((1, 0), AttemptFailure.BROKEN)], table)
    assert broken == [frozenset({(1, 0), (1, 1)}), frozenset({(1, 0)}), frozenset({(1, 0)})]
    busy = ranks_to_avoid([((1, 0), AttemptFailure.BUSY)], table)
    assert busy[0] == frozenset({(1, 0)})
    once = ranks_to_avoid([((1, 0), AttemptFailure.DISCONNECTED)], table)
    assert once[2] == frozenset()
    assert ranks_to_avoid([((1, 0), AttemptFailure.DISCONNECTED)] * 2, table)[2] == frozenset({(1, 0)})
