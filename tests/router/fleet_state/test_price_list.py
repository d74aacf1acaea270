"""Prices and homes change together: in any order of messages, no decision combines the homes of one epoch
with the prices of another.
"""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet.dispatch import ROW_HASH
from fleet.layout import EP
from fleet.placement import Placement, linear
from fleet.signatures import ClusterModel
from router.fleet_state.cluster_homes import ClusterHomes, EngineHomes
from router.fleet_state.dispatch_cost import DispatchCost, DispatchPrices
from router.fleet_state.view import FleetView
from tests.router.decision_builders import view_of
from tests.router.router_fixture import SHAPE

PLACED, SAID, BEGUN, PRICED, CLUSTERS, JOINED = range(6)
STEPS = st.lists(
    st.tuples(st.sampled_from((PLACED, SAID, BEGUN, PRICED, CLUSTERS, JOINED)), st.integers(0, 3)),
    max_size=25,
)


def homes(version: int, epoch: int) -> ClusterHomes:
    return ClusterHomes(version, epoch, np.full((2, 1), 1.0 + version, np.float32))


def clusters(version: int) -> ClusterModel:
    even = np.full((1, SHAPE.layers, SHAPE.experts), 1 / SHAPE.experts, np.float32)
    return ClusterModel(version, even, np.ones(1, np.float32), 1.0)


def placed(epoch: int) -> Placement:
    return Placement(
        linear(layers=SHAPE.layers, experts=SHAPE.experts, ranks=2).expert_of_slot,
        experts=SHAPE.experts,
        ranks=2,
        epoch=epoch,
    )


class Pricing(NamedTuple):
    """A price computation in progress, off the event loop."""

    epoch: int
    clusters: int


class World:
    """One engine, the messages about it, and a router's view of it."""

    def __init__(self) -> None:
        self.view: FleetView = view_of({}, clusters=clusters(1))[0]
        state = self.view.engine(1)
        assert state is not None
        self.joined = state.joined
        self.served, self.clusters, self.version = 0, 1, 0
        self.received: list[ClusterHomes] = []
        self.pricing: Pricing | None = None
        self.price(Pricing(0, 1))

    def do(self, what: int, much: int) -> None:
        if what == PLACED:
            self.served += 1 + much % 2
            assert self.view.place(1, placed(self.served), EP)
        elif what == SAID:
            self.version += 1
            self.say(homes(self.version, max(self.served + much - 1, 0)))
        elif what == BEGUN:
            self.pricing = self.pricing or Pricing(self.served, self.clusters)
        elif what == PRICED and self.pricing is not None:
            self.price(self.pricing)
            self.pricing = None
        elif what == CLUSTERS:
            self.clusters += 1
            assert self.view.learn("demo", clusters(self.clusters))
        elif what == JOINED:
            self.view.join(self.joined, 0.0)
            self.view.sign_of_life(1, 0.0)

    def say(self, published: ClusterHomes) -> None:
        self.received.append(published)
        self.view.set_homes(1, published)

    def price(self, work: Pricing) -> None:
        table = np.full((2, 1), 1.0 + work.epoch)
        self.view.price(1, work.epoch, DispatchCost(DispatchPrices(table, table, table), None, work.clusters))

    def seen(self) -> tuple[int, int]:
        """Return the epoch of the prices, and the version of the homes (0: none), as a decision reports them
        and as it applies them.
        """
        found = self.view.prices("demo")
        priced, published = found.versions.prices["e0"], found.versions.homes.get("e0")
        assert priced is not None
        assert (found.remote == 1.0 + priced).all()
        assert (published is None) == (found.homes is None)
        if published is None:
            return priced, 0
        assert found.homes is not None
        assert (found.homes == 1.0 + published[0]).all()
        assert published[1] <= priced, "homes of an epoch that is not priced yet"
        return priced, published[0]


@given(STEPS)
def test_no_decision_sees_homes_and_prices_that_do_not_belong_together_and_the_newest_of_both_win(
    steps: list[tuple[int, int]],
) -> None:
    world, before = World(), (0, 0)
    for step in steps:
        world.do(*step)
        now = world.seen()
        assert now[0] >= before[0], "prices of an older epoch"
        assert now[1] >= before[1], "homes of an older version"
        newest = world.received[-1] if world.received else None
        assert newest is None or newest.epoch > now[0] or newest.version == now[1], (
            "both are known, and only one of them holds"
        )
        before = now
    world.do(BEGUN, 0)
    world.do(PRICED, 0)  # one in progress may belong to an outdated placement
    world.do(BEGUN, 0)
    world.do(PRICED, 0)
    last = world.received[-1] if world.received else None
    assert world.seen()[0] == world.served
    assert last is None or last.epoch > world.served or world.seen()[1] == last.version


def test_homes_of_the_next_epoch_wait_for_its_prices_and_then_both_change_in_one_step() -> None:
    world = World()
    world.say(homes(1, 0))
    world.say(homes(2, 1))
    assert world.seen() == (0, 1)
    assert world.view.prices("demo").versions.coming == {"e0": (2, 1)}
    world.do(PLACED, 0)
    assert world.seen() == (0, 1), "served, and not priced yet"
    version = world.view.version
    world.price(Pricing(1, 1))
    assert world.seen() == (1, 2)
    assert world.view.version == version + 1
    assert world.view.prices("demo").versions.coming == {}


def test_homes_that_a_newer_word_takes_back_for_an_older_epoch_are_gone_at_once_and_so_are_those_that_waited() -> (
    None
):
    waiting = EngineHomes().received(homes(1, 0), 0).received(homes(2, 3), 0)
    assert waiting.now is not None
    assert waiting.coming is not None
    taken_back = waiting.received(ClusterHomes(3, 0, None), 0)
    assert taken_back == EngineHomes(ClusterHomes(3, 0, None))
    assert taken_back.reaching(3) is taken_back
    assert taken_back.received(homes(2, 3), 0) is taken_back, "published late"


def test_current_homes_may_arrive_after_waiting_ones() -> None:
    coming = EngineHomes().received(homes(5, 2), 0)
    both = coming.received(homes(4, 0), 0)
    assert both.now is not None
    assert both.coming is not None
    assert (both.now.version, both.coming.version) == (4, 5)
    assert both.received(homes(4, 0), 0) is both
    assert both.reaching(1) is both
    assert both.reaching(2).now is both.coming


def test_before_anything_is_priced_homes_wait() -> None:
    published = homes(1, 0)
    waiting = EngineHomes().received(published, None)
    assert waiting.now is None
    assert waiting.reaching(0).now is published
    assert EngineHomes().reaching(None) == EngineHomes()


def test_every_rank_receives_every_token_so_experts_cost_nothing_and_the_decision_says_so() -> None:
    gathering = {"gathers_all": True, "dispatch": ROW_HASH, "rearranges": True}
    view = view_of(gathering, {}, clusters=clusters(1))[0]
    table, found = view.target_table("demo"), view.prices("demo")
    notes = {target.engine.engine: target.note for target in table.targets}
    assert notes == {
        "e0": "every rank receives every token: it costs nothing where the experts are",
        "e1": None,
    }
    of_first = np.array([target.engine.engine == "e0" for target in table.targets])
    assert not found.priced[of_first].any()
    assert (found.remote[of_first] == 0.0).all()
    assert (found.remote[~of_first] > 0.0).all()
