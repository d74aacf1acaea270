"""Wait queue: admission order, wake-ups on free capacity, timely refusals, and no leftovers. Virtual time."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.memory import MemoryBroker, MemoryBus
from fleet.completions import ApiError
from fleet.facts.dynamo_kv import KvMetrics
from router.admission.queue_policy import AGED_EVERY
from router.config import RouterConfig
from router.fleet_state.reservations import Booking
from router.prefix_index.prompt import TextPrompt
from router.scheduling.routing_request import FIRST_TRY, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from tests.router.router_fixture import engine_joined

pytestmark = pytest.mark.looptime

NOTHING = 1e-6


class Front:
    """Service whose ranks are numbers only: requests are admitted, hold their slot for a while, and are
    released.
    """

    def __init__(self, service: RouterService) -> None:
        self.service = service
        self.order: list[str] = []
        """names of requests in the order of their admission"""
        self.targets: dict[str, str] = {}
        self.open: dict[str, Booking] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def request_log(self, name: str, priority: str = "normal", timeout: float | None = None) -> RequestLog:
        request_log = RequestLog(name, name, "/v1/completions", self.now)
        request_log.model, request_log.priority = "demo", priority
        request_log.urgency = self.service.config.classes.index(priority)
        if timeout is not None:
            request_log.give_up_at = self.now + timeout
        return request_log

    async def admit(
        self,
        name: str,
        priority: str = "normal",
        *,
        begun: bool = False,
        context: int = 0,
        timeout: float | None = None,
    ) -> RequestLog:
        """Get a slot, and hold it until `release`."""
        request_log = self.request_log(name, priority, timeout)
        need = RoutingRequest("demo", TextPrompt(name.encode() * 8, "demo"), context, 10, None, name)
        decision, booking = await self.service.wait_queue.admit(request_log, need, "", FIRST_TRY, begun=begun)
        self.order.append(name)
        assert name not in self.targets
        self.targets[name], self.open[name] = decision.target.name, booking
        return request_log

    async def visit(self, name: str, priority: str = "normal", seconds: float = 1.0, **about: Any) -> None:
        await self.admit(name, priority, **about)
        await asyncio.sleep(seconds)
        self.release(name)

    def begin(self, name: str, priority: str = "normal", **about: Any) -> "asyncio.Task[RequestLog]":
        return asyncio.create_task(self.admit(name, priority, **about), name=f"request {name} is admitted")

    def release(self, name: str) -> None:
        self.service.release(self.open.pop(name))

    def samples(self, family: str) -> dict[str, float]:
        text = self.service.metrics.exposition().decode()
        lines = [
            line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"roost_router_{family}")
        ]
        return {name.removeprefix(f"roost_router_{family}"): float(value) for name, value in lines}


Opened = Callable[..., Front]


@pytest.fixture
def opened() -> Opened:
    """Call `opened(ranks=1, places=1, **settings)` for a service on the loop's clock, with one engine."""

    def start(*, ranks: int = 1, engine: bool = True, **settings: Any) -> Front:
        config = RouterConfig(
            **{"max_requests_per_rank": 1, "max_queue_seconds": 1e6, "lockstep_weight": 0.0} | settings
        )
        broker = MemoryBroker()
        loop = asyncio.get_running_loop()
        service = RouterService(
            MemoryBus(broker), broker.subjects, config, clock=loop.time, chance=random.Random(7)
        )
        front = Front(service)
        service.view.join(joined(ranks), loop.time())
        if engine:
            service.view.sign_of_life(1, loop.time())
        return front

    return start


def joined(ranks: int = 1, **about: Any) -> Any:
    return engine_joined(
        "e",
        [f"http://h:{rank}" for rank in range(ranks)],
        None,
        worker_id=1,
        shape=None,
        placement=None,
        **about,
    )


async def settled() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(10):
        await asyncio.sleep(0)


async def refusal(task: Awaitable[object]) -> tuple[str | None, int]:
    with pytest.raises(ApiError) as refused:
        await task
    assert refused.value.retry_after is not None
    assert 1.0 <= refused.value.retry_after <= 60.0
    return refused.value.code, refused.value.status


async def test_with_free_capacity_no_request_waits_and_nothing_is_awaited(opened: Opened) -> None:
    front = opened(ranks=2)
    coroutine = front.admit("a")
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)  # it ends without being suspended
    assert done.value.value.queued_seconds == 0.0
    assert front.samples("queue_requests") == {}


async def test_a_released_slot_goes_to_a_waiting_request(opened: Opened) -> None:
    front = opened()
    await front.admit("a")
    waiting = front.begin("b")
    await asyncio.sleep(0.5)
    front.release("a")
    await settled()
    assert waiting.done()
    assert (await waiting).queued_seconds == pytest.approx(0.5)
    assert front.now == pytest.approx(0.5)


async def test_classes_come_in_order_and_continuations_first(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    tasks = [
        front.begin(name, name.split("-")[0])
        for name in ("low-1", "normal-1", "high-1", "low-2", "high-2", "normal-2")
    ]
    await settled()
    tasks.append(front.begin("low-begun", "low", begun=True))
    await settled()
    for name in ("running", "low-begun", "high-1", "high-2", "normal-1", "normal-2", "low-1"):
        front.release(name)
        await settled()
    assert front.order == [
        "running",
        "low-begun",
        "high-1",
        "high-2",
        "normal-1",
        "normal-2",
        "low-1",
        "low-2",
    ]
    assert all(task.done() for task in tasks)


async def test_a_new_request_does_not_pass_its_own_class_but_passes_lower_ones(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    first = front.begin("normal-1")
    await settled()
    front.service.scheduler.reservations.release(front.open["running"])  # frees capacity without an event
    second = front.begin("normal-2")
    high = front.begin("high", "high")
    await settled()
    assert high.done()
    assert front.order == ["running", "high"]
    assert not first.done()
    front.release("high")
    await settled()
    assert front.order == ["running", "high", "normal-1"]
    assert not second.done()
    second.cancel()


async def test_capacity_that_no_event_reports_is_found_within_a_tenth_of_a_second(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    waiting = front.begin("b")
    await settled()
    front.service.scheduler.reservations.release(front.open["running"])
    await waiting
    assert front.now <= 0.1 + NOTHING


async def test_when_the_queue_has_no_room_the_answer_is_429_at_once(opened: Opened) -> None:
    front = opened(queue_requests=0)
    await front.admit("running")
    assert await refusal(front.admit("b")) == ("saturated", 429)
    assert front.now == 0.0
    assert front.samples("refused_total") == {'{class="normal",code="saturated"}': 1.0}


async def test_a_full_queue_sheds_the_least_urgent_and_refuses_those_of_no_higher_class(
    opened: Opened,
) -> None:
    front = opened(queue_requests=2)
    await front.admit("running")
    tasks = {
        name: front.begin(name, name.split("-")[0])
        for name in ("low-1", "low-2", "normal-1", "low-3", "normal-2", "normal-3", "high-1")
    }
    await settled()
    assert await refusal(tasks["low-2"]) == ("shed", 429)
    assert await refusal(tasks["low-3"]) == ("saturated", 429)
    assert await refusal(tasks["low-1"]) == ("shed", 429)
    assert await refusal(tasks["normal-3"]) == ("saturated", 429)
    assert await refusal(tasks["normal-2"]) == ("shed", 429)
    front.release("running")
    await settled()
    front.release("high-1")
    await settled()
    assert front.order == ["running", "high-1", "normal-1"]
    assert front.samples("refused_total") == {
        '{class="low",code="shed"}': 2.0,
        '{class="low",code="saturated"}': 1.0,
        '{class="normal",code="saturated"}': 1.0,
        '{class="normal",code="shed"}': 1.0,
    }


async def test_bytes_that_wait_are_bounded(opened: Opened) -> None:
    front = opened(queue_bytes=20_000)
    await front.admit("running")
    tasks = [front.begin(f"r{number}") for number in range(4)]
    await settled()
    assert sum(task.done() for task in tasks) == 2
    for task in tasks[2:]:
        assert await refusal(task) == ("saturated", 429)
    for task in tasks[:2]:
        task.cancel()


async def test_a_request_that_waits_too_long_is_refused_with_503(opened: Opened) -> None:
    front = opened(queue_wait_seconds=3.0)
    await front.admit("running")
    assert await refusal(front.admit("b")) == ("queue_timeout", 503)
    assert front.now == pytest.approx(3.0, abs=0.1 + NOTHING)


async def test_a_client_may_name_an_earlier_deadline_but_no_later_one(opened: Opened) -> None:
    front = opened(queue_wait_seconds=3.0)
    await front.admit("running")
    late = front.begin("late", timeout=60.0)
    assert await refusal(front.admit("early", timeout=1.0)) == ("queue_timeout", 503)
    assert front.now == pytest.approx(1.0, abs=0.1 + NOTHING)
    assert await refusal(late) == ("queue_timeout", 503)
    assert front.now == pytest.approx(3.0, abs=0.1 + NOTHING)


async def test_an_engine_that_returns_in_time_serves_the_requests_that_waited_for_it(opened: Opened) -> None:
    front = opened(ranks=2, engine=False)
    waiting = [front.begin(f"r{number}") for number in range(2)]
    asking = asyncio.create_task(
        front.service.wait_queue.live_target_table(front.request_log("asks"), "demo")
    )
    await asyncio.sleep(1.5)
    assert len(front.service.wait_queue) == 3
    front.service.view.sign_of_life(1, front.now)
    front.service.wait_queue.wake()
    await settled()
    assert all(task.done() for task in waiting)
    assert len((await asking).targets) == 2
    assert front.now == pytest.approx(1.5)


async def test_without_an_engine_requests_wait_for_two_seconds_and_no_longer(opened: Opened) -> None:
    front = opened(engine=False, no_engine_wait_seconds=2.0)
    first = front.begin("first")
    await asyncio.sleep(1.0)
    second = front.begin("second")
    assert await refusal(first) == ("no_engine", 503)
    assert front.now == pytest.approx(2.0, abs=0.1 + NOTHING)
    assert await refusal(second) == ("no_engine", 503)
    assert front.now == pytest.approx(3.0, abs=0.1 + NOTHING)


async def test_queued_requests_wait_two_seconds_when_all_engines_die(opened: Opened) -> None:
    front = opened(no_engine_wait_seconds=2.0)
    await front.admit("running")
    waiting, lucky = front.begin("b"), front.begin("c", timeout=60.0)
    await asyncio.sleep(5.0)
    front.service.view.leave(1)
    await asyncio.sleep(1.0)
    front.service.view.join(joined(), front.now)
    front.service.view.sign_of_life(1, front.now)
    await asyncio.sleep(3.0)  # the engine returned: the requests' own deadlines apply again
    assert not waiting.done()
    front.service.view.leave(1)
    assert await refusal(lucky) == await refusal(waiting) == ("no_engine", 503)
    assert front.now == pytest.approx(
        10.0, abs=0.2
    )  # at their own deadline, which is sooner than two seconds from then


async def test_an_unknown_model_is_refused_at_once(opened: Opened) -> None:
    front = opened()
    with pytest.raises(ApiError) as refused:
        await front.service.wait_queue.live_target_table(front.request_log("x"), "nobody's")
    assert (refused.value.status, front.now) == (404, 0.0)


async def test_a_stopping_router_refuses_waiting_and_new_requests(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    waiting = front.begin("b")
    await settled()
    front.service.wait_queue.close()
    assert await refusal(waiting) == ("not_ready", 503)
    assert await refusal(front.admit("c")) == ("not_ready", 503)


async def test_an_error_of_deciding_is_raised_in_its_own_request(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    wrong = RoutingRequest("demo", TextPrompt(b"x", "demo"), 0, 10, "another tokenizer")
    request_log = front.request_log("wrong")
    task = asyncio.create_task(front.service.wait_queue.admit(request_log, wrong, "", FIRST_TRY, begun=True))
    await settled()
    if not task.done():
        front.release("running")
    with pytest.raises(ApiError, match="another tokenizer"):
        await task


async def test_a_prompt_that_fits_nowhere_yet_blocks_no_other_request(opened: Opened) -> None:
    front = opened()
    front.service.view.join(
        engine_joined("small", ["http://h:9"], None, worker_id=2, shape=None, placement=None, max_context=50),
        0.0,
    )
    front.service.view.sign_of_life(2, 0.0)
    await front.admit("long-1", context=100)
    await front.admit("short-1")
    assert front.targets == {"long-1": "e/0", "short-1": "small/0"}
    long_two, short_two = front.begin("long-2", context=100), front.begin("short-2")
    await settled()
    front.release("short-1")
    await settled()
    assert front.order[2:] == ["short-2"]
    assert not long_two.done()
    front.release("long-1")
    await settled()
    assert front.targets["long-2"] == "e/0"
    assert short_two.done()


async def test_a_load_report_that_shows_free_capacity_wakes(opened: Opened) -> None:
    front = opened()
    feeds = front.service.fleet_subscriber
    assert feeds is not None
    full = KvMetrics(worker_id=1, running=1)
    feeds.handle(full)
    waiting = front.begin("b")
    await settled()
    assert not waiting.done()
    feeds.handle(KvMetrics(worker_id=1, running=0))
    await settled()
    assert waiting.done()
    assert front.now == 0.0


async def test_the_wait_is_in_metrics_and_gauges_return_to_zero(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    waiting, left = front.begin("b", "high"), front.begin("c", "low")
    await asyncio.sleep(0.25)
    assert front.samples("queue_requests") == {'{class="high"}': 1.0, '{class="low"}': 1.0}
    left.cancel()
    front.release("running")
    await waiting
    await settled()
    assert front.samples("queue_requests") == {'{class="high"}': 0.0, '{class="low"}': 0.0}
    assert front.samples("queue_wait_seconds_sum")['{class="high"}'] == pytest.approx(0.25)


@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_at_any_moment_nothing_stays_behind(opened: Opened, turns: int) -> None:
    """The client disconnects `turns` turns of the event loop after the slot that it waits for becomes
    free."""
    front = opened()
    await front.admit("running")
    waiting = front.begin("b")
    later = front.begin("c")
    await settled()
    front.release("running")
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    if "b" in front.open:
        front.release("b")  # it was admitted before its cancellation
    await later
    front.release("c")
    assert front.service.scheduler.reservations.open_bookings == 0
    assert len(front.service.wait_queue) == 0


async def test_a_request_that_leaves_the_queue_makes_room_in_it(opened: Opened) -> None:
    front = opened(queue_requests=1)
    await front.admit("running")
    first = front.begin("b")
    await settled()
    first.cancel()
    await settled()
    second = front.begin("c")
    await settled()
    assert len(front.service.wait_queue) == 1
    front.release("running")
    await second
    assert front.order == ["running", "c"]


async def test_an_aged_request_gets_its_place_among_more_urgent_ones(opened: Opened) -> None:
    front = opened(queue_wait_seconds=10.0)
    await front.admit("r0")
    old = front.begin("old", "low")
    await asyncio.sleep(5.1)
    others = [front.begin(f"high-{number}", "high") for number in range(10)]
    await settled()
    front.release("r0")
    while not old.done():
        await settled()
        front.release(front.order[-1])
    assert front.order.index("old") == AGED_EVERY
    for task in others:
        task.cancel()


async def test_urgent_newcomers_do_not_keep_an_aged_request_from_its_place(opened: Opened) -> None:
    front = opened(queue_wait_seconds=10.0)
    await front.admit("r0")
    old = front.begin("old", "low")
    await asyncio.sleep(5.15)
    tasks = []
    for number in range(2 * AGED_EVERY):  # each arrives while a slot is free and no event has reported it yet
        front.service.scheduler.reservations.release(front.open.pop(front.order[-1]))
        tasks.append(front.begin(f"high-{number}", "high"))
        await settled()
    assert front.order.index("old") == AGED_EVERY
    assert old.done()
    for task in tasks:
        task.cancel()


async def test_a_burst_of_a_thousand_is_answered_in_class_order_and_each_once(opened: Opened) -> None:
    front = opened(ranks=4, max_requests_per_rank=4, queue_wait_seconds=1e4, queue_requests=1000)
    chance = random.Random(3)
    names = [f"{chance.choice(('high', 'normal', 'low'))}-{number}" for number in range(1000)]
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(
                front.visit(name, name.split("-")[0], seconds=chance.uniform(0.5, 1.5)),
                name=f"request {name}",
            )
        await settled()
        assert len(front.service.wait_queue) == 1000 - 16
        assert max(count for count in counts(front).values()) == 4
    assert sorted(front.order) == sorted(names)
    assert front.service.scheduler.reservations.open_bookings == 0
    waited = front.order[16:]
    classes = [name.split("-")[0] for name in waited]
    assert classes == sorted(classes, key=("high", "normal", "low").index)
    for name in ("high", "normal", "low"):
        numbers = [int(one.split("-")[1]) for one in waited if one.startswith(name)]
        assert (
            sum(later < earlier for earlier, later in pairwise(numbers)) <= len(numbers) // 4
        )  # requests admitted together may swap
    assert front.samples("refused_total") == {}


def counts(front: Front) -> dict[str, int]:
    held: dict[str, int] = {}
    for name in front.open:
        held[front.targets[name]] = held.get(front.targets[name], 0) + 1
    return held


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whatever_arrives_leaves_or_breaks_no_request_is_lost_and_nothing_stays_booked(seed: int) -> None:
    """Requests of all classes arrive, leave, and hold slots, while an engine dies and returns; each gets
    exactly one answer.
    """
    chance = random.Random(seed)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        config = RouterConfig(
            max_requests_per_rank=2, queue_requests=12, queue_wait_seconds=4.0, lockstep_weight=0.0
        )
        broker = MemoryBroker()
        front = Front(
            RouterService(MemoryBus(broker), broker.subjects, config, clock=loop.time, chance=chance)
        )
        front.service.view.join(joined(3), 0.0)
        front.service.view.sign_of_life(1, 0.0)
        answers: dict[str, str] = {}

        async def one(name: str) -> None:
            await asyncio.sleep(chance.uniform(0, 12))
            try:
                await front.visit(
                    name, chance.choice(config.classes), chance.uniform(0.1, 3), begun=chance.random() < 0.1
                )
            except ApiError as error:
                answers[name] = str(error.code)
            except asyncio.CancelledError:
                if name in front.open:
                    front.release(name)
                answers[name] = "left"
            else:
                answers[name] = "served"

        tasks = [asyncio.create_task(one(f"r{number}"), name=f"request {number}") for number in range(60)]
        for _ in range(10):
            await asyncio.sleep(chance.uniform(0.2, 2))
            if chance.random() < 0.5:
                front.service.view.leave(1)
                await asyncio.sleep(chance.uniform(0.1, 3))
                front.service.view.join(joined(3), loop.time())
                front.service.view.sign_of_life(1, loop.time())
            chance.choice(tasks).cancel()
        await asyncio.wait(tasks)
        assert len(answers) + sum(task.cancelled() for task in tasks) == 60
        assert set(answers.values()) <= {"served", "left", "saturated", "shed", "queue_timeout", "no_engine"}
        assert front.service.scheduler.reservations.open_bookings == 0
        assert len(front.service.wait_queue) == 0

    loop = looptime.patch_event_loop(asyncio.new_event_loop())
    try:
        loop.run_until_complete(story())
    finally:
        loop.close()


async def test_a_request_that_does_not_wait_passes_none_that_does(opened: Opened) -> None:
    front = opened()
    await front.admit("running")
    waiting = front.begin("b")
    await settled()
    front.service.scheduler.reservations.release(front.open["running"])  # frees capacity without an event
    need = RoutingRequest("demo", TextPrompt(b"x", "demo"), 0, 10, None)
    for priority, code in (("normal", "saturated"), ("low", "saturated")):
        asked = front.service.wait_queue.admit(
            front.request_log("now", priority), need, "", FIRST_TRY, begun=False, wait=False
        )
        assert await refusal(asked) == (code, 429)
    await front.service.wait_queue.admit(
        front.request_log("now", "high"), need, "", FIRST_TRY, begun=False, wait=False
    )
    waiting.cancel()


async def test_a_clients_deadline_is_for_the_beginning_of_its_answer(opened: Opened) -> None:
    front = opened(queue_wait_seconds=3.0)
    await front.admit("running")
    await asyncio.sleep(0)
    assert await refusal(front.admit("b", begun=True, timeout=0.5)) == ("queue_timeout", 503)
    assert front.now == pytest.approx(3.0, abs=0.1 + NOTHING)


async def test_excluded_ranks_have_no_slots_unless_no_other_rank_remains(opened: Opened) -> None:
    front = opened(ranks=3, max_requests_per_rank=5)
    scheduler = front.service.scheduler
    assert scheduler.places("demo", 0.0) == 15
    scheduler.health.drain(1, 0, "maintenance")
    assert scheduler.places("demo", 0.0) == 10
    for rank in range(3):
        scheduler.reservations.book((1, rank), (0, 5 if rank == 1 else 1, 0, 0), 0.0)
    assert scheduler.places("demo", 0.0) == 4
    scheduler.health.drain(1, None, "all of it")
    assert scheduler.places("demo", 0.0) == 0
    front.service.view.leave(1)
    assert scheduler.places("demo", 0.0) is None


async def test_a_drain_that_is_undone_wakes(opened: Opened) -> None:
    front = opened(ranks=2)
    front.service.scheduler.health.drain(1, 1, "maintenance")
    await front.admit("running")
    waiting = front.begin("b")
    await settled()
    front.service.scheduler.health.undrain(1, 1)
    await waiting
    assert front.now <= 0.1 + NOTHING


async def test_retry_after_follows_the_rate_at_which_places_become_free(opened: Opened) -> None:
    front = opened(queue_requests=20, queue_wait_seconds=1000.0)
    await front.admit("running")
    tasks = [front.begin(f"r{number}") for number in range(20)]
    await settled()
    with pytest.raises(ApiError) as early:
        await front.admit("too-much")
    for _ in range(10):  # one slot every 2 s
        await asyncio.sleep(0.9)
        front.release(front.order[-1])
        await settled()
        tasks.append(front.begin(f"more-{front.now}"))
        await asyncio.sleep(1.1)
    with pytest.raises(ApiError) as late:
        await front.admit("too-much")
    assert (early.value.retry_after, late.value.retry_after) == (2.0, pytest.approx(42.0, rel=0.1))
    for task in tasks:
        task.cancel()


async def test_many_slots_are_given_in_short_turns_for_any_wake_up(opened: Opened) -> None:
    front = opened(ranks=2, max_requests_per_rank=60)
    running = [front.service.scheduler.reservations.book((1, rank), (0, 60, 0, 0), 0.0) for rank in range(2)]
    tasks = [front.begin(f"r{number}") for number in range(120)]
    await settled()
    for booking in running:
        front.service.scheduler.reservations.release(booking)
    room, most = front.service.wait_queue, 0
    room.wake()
    while len(room):
        before = len(room)
        room.wake()
        await asyncio.sleep(0)
        most = max(most, before - len(room))
    assert most == 16
    await asyncio.gather(*tasks)
