"""Deciding for other data planes: over HTTP, over the bus and as a library, all explained alike; what is reserved ends, one way or another."""

import asyncio
import contextlib
import dataclasses
import inspect
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from bus import BusError
from bus.memory import MemoryBroker, MemoryBus
from fleet.completions import ApiError
from fleet.events import EngineHeartbeat, EngineJoined, KvMetrics, RouteDecided, RouteReleased, RouteRequested
from router.api.app import create_app
from router.api.bus_api import BusApi
from router.api.library import Decider
from router.config import RouterConfig
from router.fleet_state.reservations import PREFILL, SEQUENCES, STEPS, Reservations
from router.scheduling.external_reservations import ExternalReservations
from router.service import RouterService
from router.sync import peer_routers
from tests.router.router_fixture import Answered, chat, engine_joined, running, served_app, until
from tests.simulated_engines import AGENT, simulated_engine


@dataclass
class Door:
    """One router of several on one broker."""

    service: RouterService
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> Answered:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data) as response:
            return Answered(response.status, {name.lower(): value for name, value in response.headers.items()}, await response.read())

    async def get(self, path: str) -> Answered:
        async with self.http.get(self.url + path) as response:
            return Answered(response.status, {}, await response.read())

    @property
    def load(self) -> list[list[int]]:
        roster = self.service.view.roster("demo")
        return self.service.picker.reservations.load(roster.rows, self.service.clock()).tolist()  # type: ignore[no-any-return]

    def column(self, rank: str) -> list[int]:
        """Load of one rank, "a/0" or "a/1"."""
        return [row[int(rank[-1])] for row in self.load]


NOTHING = [[0, 0]] * 4


def reported(running: int, held: Sequence[int] = (0, 0, 0, 0)) -> list[int]:
    """The load of a rank that reported as `Street.report` does, beside what is held there; a sequence is expected to emit 64 tokens yet."""
    return [own + more for own, more in zip((10, running, 100, 64 * running), held, strict=True)]


class Street:
    """Routers on one broker, and one engine of two ranks that speaks text."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.subjects = self.broker.subjects
        self.stack = stack
        self.joined: EngineJoined | None = None

    async def engine(self) -> EngineJoined:
        self.joined = engine_joined("a", ["http://h:1", "http://h:2"], None)
        await self.bus.record(self.subjects.membership("a"), self.joined)
        return self.joined

    async def beat(self) -> None:
        assert self.joined is not None
        await self.bus.publisher(self.subjects.heartbeats("a")).publish(EngineHeartbeat(engine="a", worker_id=self.joined.worker_id, epoch=0))

    async def report(self, busy: str, *doors: Door, running: int) -> None:
        """Both ranks report as many running requests, 100 blocks and 10 prompt tokens, `busy` (engine/rank) before the other; returns once
        the routers know it."""
        assert self.joined is not None
        ranks = [int(busy[-1]), 1 - int(busy[-1])]
        for rank in ranks:
            load = KvMetrics(worker_id=self.joined.worker_id, dp_rank=rank, running=running, active_decode_blocks=100, active_prefill_tokens=10)
            await self.bus.publisher(self.subjects.kv_metrics).publish(load)
        await until(lambda: all(door.column(f"a/{ranks[1]}") == reported(running) for door in doors))

    async def router(self, **settings: Any) -> Door:
        config = RouterConfig(**{"dead_after_seconds": 60.0, **settings})
        bus = MemoryBus(self.broker)
        service = RouterService(bus, self.subjects, config)
        await self.stack.enter_async_context(running(service))
        inquiries = BusApi(bus, self.subjects, Decider(service))
        task = asyncio.create_task(inquiries.run(), name="answers questions")
        self.stack.callback(task.cancel)
        url = await self.stack.enter_async_context(served_app(create_app(service)))
        http = await self.stack.enter_async_context(aiohttp.ClientSession())
        if self.joined is not None:
            await self.beat()
        await until(lambda: service.ready)
        await inquiries.listening.wait()
        return Door(service, url, http)


@pytest.fixture(autouse=True)
def quick_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a memory bus others answer at once."""
    monkeypatch.setattr(peer_routers, "MEETING_SECONDS", 0.02)


@pytest.fixture
async def street() -> AsyncIterator[Street]:
    async with contextlib.AsyncExitStack() as stack:
        street = Street(stack)
        await street.engine()
        yield street


AGENT_OFTEN = dataclasses.replace(AGENT, load_seconds=0.02)
OF_ITS_OWN = {"id", "request_id", "seed", "chosen", "runner_up", "if_gone", "without", "url", "expires_seconds", "candidates"}


def alike(record: dict[str, Any]) -> dict[str, Any]:
    """What must be the same however it was asked for."""
    return {name: value for name, value in record.items() if name not in OF_ITS_OWN}


async def test_what_is_reserved_is_booked_until_it_is_released_whatever_ranks_report_meanwhile(street: Street) -> None:
    door = await street.router(settle_seconds=0.0)
    answer = await door.post("/v1/route/reserve", chat())
    record = answer.json
    assert answer.status == 200
    assert answer.headers["x-roost-decision-id"] == record["id"]
    assert (record["url"], record["expires_seconds"]) == ({"a/0": "http://h:1", "a/1": "http://h:2"}[record["chosen"]], 120.0)
    held, chosen = [max(row) for row in door.load], record["chosen"]
    assert held[PREFILL] > 0
    assert held[SEQUENCES] == 1
    assert (await door.get(f"/v1/decisions/{record['id']}")).json["chosen"] == chosen
    for number in (3, 0, 5):
        await street.report(chosen, door, running=number)
        assert door.column(chosen) == reported(number, held)
    noted = await door.post("/v1/route/release", {"id": record["id"], "first_token": True})
    assert (noted.status, noted.json) == (200, {"id": record["id"], "outcome": "noted"})
    assert door.column(chosen) == reported(5, [0, 0, 0, held[STEPS]])  # this report may contain it
    await street.report(chosen, door, running=6)
    assert door.column(chosen) == reported(5, [0, 1, 0, held[STEPS]])  # and this one does
    assert [(await door.post("/v1/route/release", {"id": record["id"]})).json["outcome"] for _ in range(2)] == ["ended", "unknown"]
    assert door.column(chosen) == reported(5, [0, 1, 0, 0])  # until the rank reports that it is gone
    await street.report(chosen, door, running=5)
    assert door.column(chosen) == reported(5)


async def test_a_released_reservation_takes_nothing_from_the_load_of_others(street: Street) -> None:
    door = await street.router(settle_seconds=0.0)
    record = (await door.post("/v1/route/reserve", chat())).json
    await street.report(record["chosen"], door, running=7)
    await door.post("/v1/route/release", {"id": record["id"]})
    assert door.column(record["chosen"]) == reported(7)


async def test_what_another_router_holds_counts_beside_reports_here(street: Street) -> None:
    one, other = await street.router(settle_seconds=0.0), await street.router(settle_seconds=0.0)
    record = (await one.post("/v1/route/reserve", chat())).json
    chosen, held = record["chosen"], [max(row) for row in one.load]
    await until(lambda: other.load == one.load)
    await street.report(chosen, one, other, running=7)
    assert one.column(chosen) == other.column(chosen) == reported(7, held)
    await other.post("/v1/route/release", {"id": record["id"]})
    await until(lambda: one.column(chosen) == other.column(chosen) == reported(7))


async def test_forty_reservations_before_engines_that_report_fill_forty_places_and_no_more() -> None:
    """Simulated ranks that report that they are idle, many times after the last reservation has settled."""
    async with contextlib.AsyncExitStack() as stack:
        street = Street(stack)
        await stack.enter_async_context(simulated_engine(MemoryBus(street.broker), street.subjects, agent=AGENT_OFTEN, shape="demo"))
        door = await street.router(max_requests_per_rank=20, queue_requests=0)
        bodies = [chat(f"question {number} " + "word " * 400, model="demo") for number in range(40)]
        assert [(await door.post("/v1/route/reserve", body)).status for body in bodies] == [200] * 40
        before = door.load
        said = await stack.enter_async_context(street.bus.subscribe(street.subjects.kv_metrics))
        began, seen = time.monotonic(), [0, 0]
        while min(seen) < 8 or time.monotonic() - began < 0.3:  # past `settle_seconds`
            message = (await anext(said)).message
            assert isinstance(message, KvMetrics)
            assert not message.running
            seen[message.dp_rank] += 1
        assert door.load == before
        assert before[SEQUENCES] == [20, 20]
        assert min(before[PREFILL]) > 20 * 400
        assert (await door.post("/v1/route/reserve", bodies[0])).status == 429


async def test_explaining_holds_nothing(street: Street) -> None:
    door = await street.router()
    assert (await door.post("/v1/route", chat())).status == 200
    assert door.load == NOTHING


@pytest.mark.parametrize("body", [b"", b"{}", b'{"id": 7}', b"\xff", b"[" * 5000])
async def test_a_release_that_names_nothing_is_refused(street: Street, body: bytes) -> None:
    door = await street.router()
    answer = await door.post("/v1/route/release", body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_value")


async def test_http_bus_and_library_explain_alike(street: Street) -> None:
    door = await street.router()
    over_http = (await door.post("/v1/route", chat())).json
    decided = await street.bus.request(street.subjects.route, RouteRequested(body=msgspec.json.encode(chat())))
    assert isinstance(decided, RouteDecided)
    over_bus = msgspec.json.decode(decided.record)
    as_library = msgspec.to_builtins(await Decider(door.service).decide(chat()))
    assert alike(over_http) == alike(over_bus) == alike(as_library)
    assert {one["rank"]: one["terms_ms"] for one in over_http["candidates"]} == {one["rank"]: one["terms_ms"] for one in over_bus["candidates"]}
    assert decided.expires_seconds is None
    assert decided.url.startswith("http://h:")


async def test_over_the_bus_a_request_is_reserved_and_released_and_refused_with_a_status(street: Street) -> None:
    door = await street.router()
    decided = await street.bus.request(street.subjects.route, RouteRequested(body=msgspec.json.encode(chat()), reserve=True, session="s"))
    assert isinstance(decided, RouteDecided)
    assert decided.expires_seconds == 120.0
    released = RouteReleased(id=msgspec.json.decode(decided.record)["id"])
    assert door.load != NOTHING
    for _ in range(2):
        assert await street.bus.request(street.subjects.release, released) == released
        assert door.load == NOTHING
    with pytest.raises(BusError, match="404 model_not_found"):
        await street.bus.request(street.subjects.route, RouteRequested(body=msgspec.json.encode(chat(model="other"))))
    for subject in (street.subjects.route, street.subjects.release, street.subjects.decision(door.service.tag)):
        with pytest.raises(BusError, match="is no request for this subject"):
            await street.bus.request(subject, EngineHeartbeat(engine="a", worker_id=1, epoch=0))


@pytest.mark.parametrize("first_token", [True, False])
async def test_a_release_that_reaches_another_router_is_passed_on(street: Street, first_token: bool) -> None:
    one, other = await street.router(), await street.router()
    record = (await one.post("/v1/route/reserve", chat())).json
    await until(lambda: other.load == one.load)
    assert (await other.post("/v1/route/release", {"id": record["id"], "first_token": first_token})).json["outcome"] == "passed_on"
    await until(lambda: max(one.load[0]) == 0 and max(other.load[0]) == 0)
    await until(lambda: (one.load == other.load == NOTHING) != first_token)
    assert len(one.service.reserved) == first_token


async def test_a_decision_is_read_back_from_whichever_router_made_it(street: Street) -> None:
    one, other = await street.router(kept_decisions=1), await street.router()
    first, last = [(await one.post("/v1/route/reserve", chat())).json["id"] for _ in range(2)]
    assert last.startswith(one.service.tag)
    assert (await other.get(f"/v1/decisions/{last}")).json["id"] == last
    pushed_out = await other.get(f"/v1/decisions/{first}")
    assert pushed_out.status == 404
    assert "was made by another router" in pushed_out.json["error"]["message"]
    assert "not among the last 1" in pushed_out.json["error"]["message"]
    gone = await other.get(f"/v1/decisions/{int(one.service.tag, 16) ^ 1:08x}000000000000")
    assert (gone.status, "may be gone" in gone.json["error"]["message"]) == (404, True)
    older = await other.get("/v1/decisions/abcd0123456789ab-a2")  # the tag of a router of an older version has four digits
    assert "was made by another router (abcd)" in older.json["error"]["message"]
    assert (await other.get("/v1/decisions/nonsense")).status == 404


async def test_a_reservation_without_a_word_ends_by_itself(street: Street) -> None:
    door = await street.router(reservation_seconds=0.3)
    await door.post("/v1/route/reserve", chat())
    assert door.load != NOTHING
    await until(lambda: door.load == NOTHING)
    metrics = (await door.get("/metrics")).body.decode()
    assert 'roost_router_reservations_ended_total{how="expired"} 1.0' in metrics
    assert "roost_router_reservations_open 0.0" in metrics


def test_a_word_about_a_reservation_holds_it_longer() -> None:
    reservations, held = Reservations(settle_seconds=0.1, stale_seconds=5.0), ExternalReservations(10.0)
    reservations.add_rank("a")
    for name in ("x", "y"):
        held.hold(name, reservations.book("a", (1, 1, 1, 1), 0.0), 0.0)
    assert held.heard("x", 5.0) is not None
    assert len(held.due(10.0)) == 1
    assert (held.heard("y", 10.0), held.end("y")) == (None, None)
    assert len(held.due(14.9)) == 0
    assert len(held.due(15.0)) == 1
    assert (len(held), held.expired, held.released) == (0, 2, 0)


async def test_a_saturated_fleet_refuses_at_once(street: Street) -> None:
    door = await street.router(max_requests_per_rank=1, queue_wait_seconds=60.0)
    for _ in range(2):
        assert (await door.post("/v1/route/reserve", chat())).status == 200
    refused = await asyncio.wait_for(door.post("/v1/route/reserve", chat()), 2.0)
    assert (refused.status, refused.json["error"]["code"]) == (429, "saturated")
    with pytest.raises(ApiError) as raised:
        await asyncio.wait_for(Decider(door.service).reserve(chat()), 2.0)
    assert raised.value.status == 429
    assert raised.value.retry_after is not None


async def test_a_reservation_may_wait_its_turn_when_told_to(street: Street) -> None:
    door = await street.router(max_requests_per_rank=1, queue_wait_seconds=60.0)
    held = [(await door.post("/v1/route/reserve", chat())).json["id"] for _ in range(2)]
    over_http = asyncio.create_task(door.post("/v1/route/reserve?wait=true", chat()))
    as_library = asyncio.create_task(Decider(door.service).reserve(chat(), wait=True, priority="high"))
    await until(lambda: len(door.service.waiting) == 2)
    await door.post("/v1/route/release", {"id": held[0]})
    assert (await asyncio.wait_for(as_library, 5)).expires_seconds == 120.0
    assert not over_http.done()
    await door.post("/v1/route/release", {"id": held[1]})
    assert (await asyncio.wait_for(over_http, 5)).status == 200


async def test_a_reservation_that_is_waited_for_no_more_is_not_made(street: Street) -> None:
    door = await street.router(max_requests_per_rank=1, queue_wait_seconds=60.0)
    held = [(await door.post("/v1/route/reserve", chat())).json["id"] for _ in range(2)]
    leaver = asyncio.create_task(door.post("/v1/route/reserve?wait=true", chat()))
    await until(lambda: len(door.service.waiting) == 1)
    leaver.cancel()
    await until(lambda: len(door.service.waiting) == 0)
    for decision_id in held:
        await door.post("/v1/route/release", {"id": decision_id})
    assert door.load == NOTHING


@pytest.mark.parametrize("query", ["wait", "wait=1", "without=queue", "wait=true&wait=true"])
async def test_a_question_that_reserving_does_not_know_is_refused(street: Street, query: str) -> None:
    door = await street.router()
    answer = await door.post(f"/v1/route/reserve?{query}", chat())
    assert (answer.status, answer.json["error"]["param"]) == (400, "wait")
    assert door.load == NOTHING


async def test_the_librarys_example_works_as_it_stands(street: Street) -> None:
    example = inspect.getdoc(Decider) or ""
    lines = example[example.index("    async def forwarded") :].split("\n\n")[0]
    assert len(lines.splitlines()) <= 11
    names: dict[str, Any] = {"Decider": Decider, "RouterConfig": RouterConfig}
    exec(textwrap.dedent(lines), names)
    went_to: list[str] = []

    async def forward(url: str, _: Any) -> AsyncIterator[str]:
        went_to.append(url)
        yield "token"

    beats = asyncio.create_task(_beat_on(street), name="beats a heart")
    try:
        terms = await names["forwarded"](MemoryBus(street.broker), street.subjects, chat(), forward)
    finally:
        beats.cancel()
    assert went_to[0] in ("http://h:1", "http://h:2")
    assert terms.prefill > 0


async def _beat_on(street: Street) -> None:
    while True:
        await street.beat()
        await asyncio.sleep(0.05)


async def test_a_decider_that_hears_nobody_says_what_is_missing(street: Street) -> None:
    async with Decider.running(MemoryBus(street.broker), street.subjects) as decider:
        with pytest.raises(TimeoutError, match="a live engine"):
            await decider.ready(seconds=0.1)


async def test_a_deciders_context_passes_errors_on_as_they_are_and_its_end_is_noticed(street: Street) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Decider.running(MemoryBus(street.broker), street.subjects) as decider:
            raise KeyError("mine")
    with pytest.raises(RuntimeError, match="has ended"):
        await decider.decide(chat())
    closed = MemoryBus(street.broker)
    await closed.close()
    async with Decider.running(closed, street.subjects) as deaf:
        with pytest.raises(RuntimeError, match="has ended"):
            await deaf.ready()


async def test_the_document_describes_the_deciders_routes(street: Street) -> None:
    door = await street.router()
    paths = (await door.get("/openapi.json")).json["paths"]
    for path, form in (("/v1/route", "DecisionRecord"), ("/v1/route/reserve", "ReservedRecord"), ("/v1/route/release", "ReleaseRecord")):
        answer = paths[path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": f"#/components/schemas/{form}"}
    asked = [one["name"] for path in ("/v1/route", "/v1/route/reserve") for one in paths[path]["post"]["parameters"] if one["in"] == "query"]
    assert asked == ["without", "gone", "wait"]
