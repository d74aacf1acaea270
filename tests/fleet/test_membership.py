"""Membership and heartbeats against a plain replay of their history."""

from math import inf
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from fleet.membership import SILENT_SECONDS, Heartbeats, Membership


class Join(NamedTuple):
    engine: str
    worker_id: int


class Leave(NamedTuple):
    worker_id: int


ENGINES = {1: "a", 2: "a", 3: "a", 4: "b", 5: "b"}
EVENTS = st.lists(
    st.one_of(
        st.sampled_from([Join(engine, worker) for worker, engine in ENGINES.items()]),
        st.sampled_from([Leave(worker) for worker in ENGINES]),
    ),
    max_size=30,
)


def present(events: list[Join | Leave]) -> set[int]:
    """Return the workers present after a history: those whose last event is a join, and no later join of
    their name followed it.
    """
    found = set()
    for worker, engine in ENGINES.items():
        last = max((at for at, event in enumerate(events) if event[-1] == worker), default=-1)
        if last < 0 or isinstance(events[last], Leave):
            continue
        if not any(
            isinstance(event, Join) and event.engine == engine and event.worker_id != worker
            for event in events[last:]
        ):
            found.add(worker)
    return found


@given(EVENTS)
def test_the_last_join_of_a_name_is_present_until_it_leaves(events: list[Join | Leave]) -> None:
    members: Membership[int] = Membership()
    for at, event in enumerate(events):
        before = dict(members)
        if isinstance(event, Join):
            ended = members.join(event.engine, event.worker_id, at)
            assert ended == {
                worker: known
                for worker, known in before.items()
                if ENGINES[worker] == event.engine and worker != event.worker_id
            }
            assert members[event.worker_id] == at
        else:
            assert members.end(event.worker_id) == before.get(event.worker_id)
        assert set(members) == present(events[: at + 1])
        assert all(members.engine_of(worker) == ENGINES[worker] for worker in members)
        names = [members.engine_of(worker) for worker in members]
        assert len(names) == len(set(names)), "one incarnation of each name"
    assert len(members) == len(list(members))


def test_an_incarnation_without_a_join_ends_no_other_and_a_join_ends_it() -> None:
    members: Membership[str] = Membership()
    members.join("a", 1, "first")
    members.add("a", 2, "reported early")
    assert list(members) == [1, 2]
    assert members.join("a", 2, "joined") == {1: "first"}
    assert (list(members), members[2]) == ([2], "joined")
    assert members.engine_of(1) is None
    assert members.end(1) is None


STEPS = st.lists(
    st.tuples(st.sampled_from([0.25, 1.0, 5.0]), st.sampled_from(["beat", "audible", "deaf"])), max_size=40
)


@given(STEPS, st.sampled_from([1.5, inf]), st.sampled_from([-inf, 0.0, inf]))
def test_silence_counts_only_time_in_which_a_heartbeat_could_have_been_received(
    steps: list[tuple[float, str]], gap: float, listening: float
) -> None:
    heartbeats, now, listened = Heartbeats(gap, listening), 100.0, -inf
    since, last = listening, -inf
    for seconds, step in steps:
        now += seconds
        if step == "beat":
            heartbeats.beat(1, now)
            last = now
        else:
            heartbeats.listen(now, audible=step == "audible")
            since = now if step == "deaf" or now - listened > gap else since
            listened = now
        assert heartbeats.silence(1, now) == max(0.0, now - max(last, since))
        assert heartbeats.last(1) == (None if last == -inf else last)


def test_silence_restarts_when_the_bus_was_away_or_this_process_stood_still() -> None:
    heartbeats = Heartbeats(SILENT_SECONDS / 2, inf)
    assert heartbeats.silence(1, 5.0) == 0.0, "nothing was listened to yet"
    for now in range(10):
        heartbeats.listen(now, audible=True)
    assert heartbeats.silence(1, 9.0) == 9.0
    heartbeats.beat(1, 8.0)
    assert heartbeats.silence(1, 9.0) == 1.0
    for now in (9, 10, 11, 12):
        heartbeats.listen(now, audible=now != 11)
    assert heartbeats.silence(1, 12.0) == 1.0, "the bus was away"
    for now in (13, 14, 15):
        heartbeats.listen(now, audible=True)
    assert heartbeats.silence(1, 15.0) == 4.0
    heartbeats.listen(40.0, audible=True)
    assert heartbeats.silence(1, 40.0) == 0.0, "this process stood still"


def test_the_dead_are_forgotten() -> None:
    heartbeats = Heartbeats()
    heartbeats.beat(1, 5.0)
    heartbeats.beat(2, 5.0)
    heartbeats.keep_only({2})
    assert (heartbeats.last(1), heartbeats.last(2)) == (None, 5.0)
