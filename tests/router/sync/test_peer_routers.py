"""Several routers on one bus: no herding, bookings of dead routers expire, and a new router has the state it
needs before it is ready.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Message
from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.bookings import ReservationsChanged
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import Capabilities, EngineHeartbeat, EngineJoined
from fleet.requests.engines import KvSnapshot
from fleet.requests.refusal import RequestRefused
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.fleet_state.reservations import PREFILL, Booking
from router.health.attempt_failures import AttemptFailure
from router.prediction.predictor import PredictionKeys
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision
from router.scheduling.routing_request import FIRST_TRY, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from tests.router.router_fixture import SHAPE, engine_joined, running


class SlowBroker(MemoryBroker):
    """Broker on which every message takes a while."""

    seconds = 0.005

    def deliver(self, subject: str, raw: bytes) -> None:
        asyncio.get_running_loop().call_later(self.seconds, super().deliver, subject, raw)


class RouterNetwork:
    """Routers and engines on one broker; a background task sends the heartbeats of the engines."""

    def __init__(self, broker: MemoryBroker | None = None, **settings: Any) -> None:
        self.broker = broker or MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.subjects = self.broker.subjects
        self.settings = settings
        self.engines: list[EngineJoined] = []
        self.stack = contextlib.AsyncExitStack()
        self.beating = True
        self._beats: asyncio.Task[None] | None = None

    async def router(self, **settings: Any) -> RouterService:
        service = RouterService(
            MemoryBus(self.broker),
            self.subjects,
            RouterConfig(**{**self.settings, **settings}),
            asyncio.get_running_loop().time,
        )
        await self.stack.enter_async_context(running(service))
        return service

    async def ready_router(self, **settings: Any) -> RouterService:
        service = await self.router(**settings)
        async with asyncio.timeout(10):
            while not service.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return service

    async def engine(self, name: str, ranks: int = 1, **about: Any) -> EngineJoined:
        urls = [f"http://{name}:{rank}" for rank in range(ranks)]
        joined = engine_joined(name, urls, None, **{"shape": None, "placement": None, **about})
        await self.bus.record(self.subjects.membership(name), joined)
        self.engines.append(joined)
        self._beats = self._beats or asyncio.create_task(
            self.beat(), name="sends heartbeats"
        )  # not in the fixture, whose event loop time differs
        return joined

    async def beat(self) -> None:
        while True:
            for joined in self.engines if self.beating else ():
                voice = self.bus.publisher(self.subjects.heartbeats(joined.engine))
                await voice.publish(
                    EngineHeartbeat(engine=joined.engine, worker_id=joined.worker_id, epoch=0)
                )
            await asyncio.sleep(1.0)

    async def report(self, joined: EngineJoined, **load: int) -> None:
        await self.bus.publisher(self.subjects.kv_metrics).publish(
            KvMetrics(worker_id=joined.worker_id, **load)
        )

    async def __aenter__(self) -> "RouterNetwork":
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._beats is not None:
            self._beats.cancel()
        await self.stack.aclose()


@pytest.fixture
async def network() -> AsyncIterator[RouterNetwork]:
    async with RouterNetwork() as network:
        yield network


def need(tokens: int, first: int = 0) -> RoutingRequest:
    prompt = [(first + at) % 50_000 for at in range(tokens)]
    return RoutingRequest("demo", TokenPrompt(prompt), tokens + 1, 1, None)


def book(service: RouterService, routing: RoutingRequest) -> tuple[Decision, Booking]:
    return service.book(
        RequestLog("r", service.new_decision_id(), "/v1/completions", 0.0), routing, "", FIRST_TRY
    )


def load(service: RouterService, joined: EngineJoined) -> list[int]:
    target_table = service.view.target_table("demo")
    at = target_table.index[joined.worker_id, 0]
    return service.scheduler.reservations.load(target_table.rows, service.clock())[:, at].tolist()  # type: ignore[no-any-return]


async def burst(*, replicate: bool) -> float:
    """Send a thousand requests over two routers between two load reports; two of eight ranks are idle at the
    start.

    Return the predicted time of the fullest rank at the end, as a multiple of that of an even distribution.
    """
    async with RouterNetwork(
        SlowBroker(),
        replicate_bookings=replicate,
        max_requests_per_rank=10_000,
        max_queue_seconds=1e6,
        settle_seconds=0.1,
    ) as network:
        engines = [
            await network.engine(f"e{number}", max_context=10_000, speed=EngineSpeed()) for number in range(8)
        ]
        routers = [await network.ready_router() for _ in range(2)]
        before = np.array([0, 0, *[90_000] * 6])
        for joined, tokens in zip(engines, before.tolist(), strict=True):
            await network.report(joined, active_prefill_tokens=tokens, running=1)
        await asyncio.sleep(0.02)
        sizes = random.Random(7).choices(range(40, 800), k=1000)
        work = dict.fromkeys((joined.worker_id for joined in engines), 0)
        for number, tokens in enumerate(sizes):
            decision, _ = book(routers[number % 2], need(tokens, 7919 * number))
            work[decision.target.key[0]] += tokens
            await asyncio.sleep(0.0002)
        after = before + np.array([work[joined.worker_id] for joined in engines])
        assert sum(work.values()) == sum(sizes)
    return float(after.max() / after.mean())


@pytest.mark.looptime
async def test_two_routers_share_a_burst_between_two_reports_fairly() -> None:
    assert await burst(replicate=True) <= 1.1  # the goal is 1.25


@pytest.mark.looptime
async def test_two_routers_that_do_not_tell_each_other_herd() -> None:
    assert await burst(replicate=False) >= 1.5


@pytest.mark.looptime
async def test_what_one_router_books_the_other_counts_until_it_is_over(network: RouterNetwork) -> None:
    joined = await network.engine("a")
    one, other = await network.ready_router(), await network.ready_router()
    _, booking = book(one, need(100))
    await asyncio.sleep(0.01)
    assert load(other, joined) == load(one, joined) == [100, 1, 26, 1]
    one.first_token(booking)
    await asyncio.sleep(0.01)
    assert load(other, joined)[PREFILL] == 0
    one.release(booking)
    await asyncio.sleep(0.01)
    assert load(other, joined) == [0, 0, 0, 0]


@pytest.mark.looptime
async def test_bookings_are_published_in_batches_and_heartbeats_fill_the_gaps(network: RouterNetwork) -> None:
    await network.engine("a")
    service, _ = await network.ready_router(), await network.ready_router()
    peers = service.peers
    assert peers is not None
    async with network.bus.subscribe(network.subjects.reservations) as subscription:
        await asyncio.sleep(1.01)  # two heartbeats at most
        began = asyncio.get_running_loop().time()
        for _ in range(50):
            book(service, need(10))
            await asyncio.sleep(0.0002)
        await asyncio.sleep(0.02)
        arrived = [received async for received in _now(subscription)]
    changes = [received.message for received in arrived if isinstance(received.message, ReservationsChanged)]
    messages = [message for message in changes if message.router == peers.router]
    assert sum(len(message.booked) for message in messages) == 50
    assert sum(bool(message.booked) for message in messages) <= 4
    assert sum(not message.booked for message in messages) in (2, 3)
    assert asyncio.get_running_loop().time() - began < 0.1


async def _now(subscription: Any) -> AsyncIterator[Any]:
    """Return the messages that have arrived so far."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            async for received in subscription:
                yield received


@pytest.mark.looptime
async def test_a_router_alone_gives_signs_of_life_and_nothing_more(network: RouterNetwork) -> None:
    await network.engine("a")
    service = await network.ready_router()
    async with network.bus.subscribe(network.subjects.reservations) as subscription:
        for _ in range(50):
            service.release(book(service, need(10))[1])
            book(service, need(10))
            await asyncio.sleep(0.02)
        messages = [received.message async for received in _now(subscription)]
    assert len(messages) in (2, 3)
    assert not any(message.booked or message.ended for message in messages)


@pytest.mark.looptime
async def test_a_conversation_stays_with_its_rank_and_a_prefix_is_found_through_any_router(
    network: RouterNetwork,
) -> None:
    """The ranks send no KV events: their cached blocks are inferred from the requests sent to them."""
    for name in ("a", "b", "c", "d"):
        await network.engine(name)
    settings: dict[str, Any] = {"session_affinity_seconds": 60.0}
    one, other = await network.ready_router(**settings), await network.ready_router(**settings)
    second_turn = msgspec.structs.replace(need(400), keys=PredictionKeys(session=7, tenant=0))
    first, booking = book(one, second_turn)
    one.release(booking)
    await asyncio.sleep(0.02)
    second, booking = book(
        other, msgspec.structs.replace(need(400, 9000), keys=PredictionKeys(session=7, tenant=0))
    )
    other.release(booking)
    assert second.target == first.target
    third, _ = book(other, need(400))
    assert (third.target, third.cached_tokens > 300) == (first.target, True)


@pytest.mark.looptime
async def test_a_router_that_dies_takes_its_bookings_with_it(network: RouterNetwork) -> None:
    joined = await network.engine("a")
    one = await network.ready_router()
    dying = RouterService(
        MemoryBus(network.broker), network.subjects, RouterConfig(), asyncio.get_running_loop().time
    )
    async with running(dying):
        while not dying.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        book(dying, need(100))
        await asyncio.sleep(0.01)
        assert load(one, joined)[PREFILL] == 100
    await asyncio.sleep(2.5)
    assert load(one, joined)[PREFILL] == 100
    await asyncio.sleep(1.5)
    assert load(one, joined) == [0, 0, 0, 0]


@pytest.mark.looptime
async def test_a_new_router_learns_at_once_what_the_others_have_booked(network: RouterNetwork) -> None:
    joined = await network.engine("a")
    one = await network.ready_router()
    for _ in range(3):
        book(one, need(100))
    newcomer = await network.ready_router()
    assert load(newcomer, joined) == load(one, joined)


@pytest.mark.looptime
async def test_after_the_bus_was_away_routers_agree_again(network: RouterNetwork) -> None:
    joined = await network.engine("a")
    one, other = await network.ready_router(), await network.ready_router()
    _, over = book(one, need(100))
    await asyncio.sleep(0.1)
    network.broker.reachable = False
    one.release(over)
    book(one, need(30, 1000))
    await asyncio.sleep(10.0)
    network.broker.reachable = True
    await asyncio.sleep(2.0)
    assert load(other, joined) == load(one, joined)
    assert load(other, joined)[PREFILL] == 30


# Readiness


@pytest.mark.looptime
async def test_readiness_waits_for_kv_caches_and_tables_and_says_so(network: RouterNetwork) -> None:
    joined = await network.engine("a", capabilities=Capabilities(load=True), shape=None)
    may_answer = asyncio.Event()

    async def snapshot(_: Message) -> Message:
        await may_answer.wait()
        return KvSnapshot(worker_id=joined.worker_id, rank=0, publisher_id=1, sequence=-1, events=())

    async with network.bus.serve(network.subjects.kv_snapshot(joined.engine, joined.worker_id, 0), snapshot):
        service = await network.router()
        await asyncio.sleep(1.2)
        assert service.view.models(live=True) == ["demo"]
        assert (service.ready, service.missing) == (False, ["the KV snapshots of 1 ranks"])
        may_answer.set()
        await asyncio.sleep(0.1)
        assert (service.ready, service.missing) == (True, [])


@pytest.mark.looptime
async def test_unanswered_requests_time_out_after_a_few_seconds(network: RouterNetwork) -> None:
    await network.engine("a", capabilities=Capabilities(load=True))
    service = await network.router()
    await asyncio.sleep(4.5)
    assert not service.ready
    await asyncio.sleep(1.0)
    assert service.ready


@pytest.mark.looptime
@pytest.mark.parametrize("answers", [True, False])
async def test_a_tracker_is_waited_for_only_while_it_thinks(network: RouterNetwork, answers: bool) -> None:
    await network.engine("a", shape=SHAPE)
    thinking = asyncio.Event()

    async def describe(_: Message) -> Message:
        await thinking.wait()
        return RequestRefused(reason="none yet")

    async with contextlib.AsyncExitStack() as stack:
        if answers:
            await stack.enter_async_context(network.bus.serve(network.subjects.describe_profile, describe))
        service = await network.router()
        await asyncio.sleep(1.5)
        assert service.ready != answers
        thinking.set()
        await asyncio.sleep(0.1)
        assert service.ready


@pytest.mark.looptime
async def test_an_engine_that_joined_and_never_beats_is_not_waited_for(network: RouterNetwork) -> None:
    await network.engine("a")
    dead = await network.engine("dead")
    network.engines.remove(dead)
    service = await network.router()
    await asyncio.sleep(1.3)
    assert service.missing == ["a heartbeat of engine dead"]
    await asyncio.sleep(0.4)
    assert service.ready


# Silence


def standings(service: RouterService, names: Sequence[str] = ("a",)) -> list[str]:
    return sorted(
        f"{out.engine}: {out.reason.split(':')[0]}" for out in service.view.target_table("demo").excluded
    )


@pytest.mark.looptime
@pytest.mark.parametrize("replicate", [True, False])
async def test_engines_are_not_declared_dead_while_the_bus_is_away_nor_right_after(
    network: RouterNetwork, replicate: bool
) -> None:
    await network.engine("a")
    service = await network.ready_router(replicate_bookings=replicate)
    network.broker.reachable = False
    await asyncio.sleep(10.0)
    assert standings(service) == []
    network.beating, network.broker.reachable = False, True
    await asyncio.sleep(2.5)
    assert standings(service) == []
    await asyncio.sleep(1.5)
    assert standings(service) == ["a: dead"]


@pytest.mark.looptime
async def test_a_bus_that_takes_everything_and_carries_nothing_is_noticed(network: RouterNetwork) -> None:
    """The server hangs while the connection stays open."""
    await network.engine("a")
    service = await network.ready_router()
    deliver, network.broker.deliver = network.broker.deliver, lambda *_: None  # type: ignore[method-assign]
    await asyncio.sleep(10.0)
    assert service.bus_silent
    assert standings(service) == []
    network.broker.deliver = deliver  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    assert not service.bus_silent
    assert standings(service) == []


@pytest.mark.looptime
async def test_while_the_bus_is_away_a_failed_connection_keeps_no_engine_out(network: RouterNetwork) -> None:
    """Its next heartbeat would restore it, but cannot arrive."""
    await network.engine("a")
    service = await network.ready_router()

    def fail() -> None:
        service.attempt_failed(
            RequestLog("r", "d", "/", 0.0), *book(service, need(10)), AttemptFailure.CONNECT, "refused"
        )

    network.beating = False
    fail()
    assert standings(service) == ["a: unreachable"]
    network.broker.reachable = False
    await asyncio.sleep(0.5)
    assert standings(service) == []
    fail()
    assert standings(service) == []


@pytest.mark.looptime
async def test_one_silent_engine_among_others_is_dead(network: RouterNetwork) -> None:
    await network.engine("a")
    lost = await network.engine("b")
    service = await network.ready_router()
    network.engines.remove(lost)
    await asyncio.sleep(4.5)
    assert standings(service) == ["b: dead"]


@pytest.mark.looptime
async def test_bookings_of_others_are_requested_only_once_their_ranks_are_known(
    network: RouterNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus's store may be slow."""
    joined = await network.engine("a")
    one = await network.ready_router()
    book(one, need(100))
    replay = MemoryBus.replay

    async def slowly(bus: MemoryBus, subject: str, **how: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.7)
        async for received in replay(bus, subject, **how):
            yield received

    monkeypatch.setattr(MemoryBus, "replay", slowly)
    newcomer = await network.ready_router()
    assert load(newcomer, joined) == load(one, joined)
    assert load(newcomer, joined)[PREFILL] == 100
