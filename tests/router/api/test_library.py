"""Decisions for other data planes: over HTTP, over the bus and as a library, all explained alike. Every
reservation ends.
"""

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
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineJoined
from fleet.requests.routing import RouteDecided, RouteReleased, RouteRequested
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
class RouterEndpoint:
    """One of several routers on one broker."""

    service: RouterService
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> Answered:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data) as response:
            return Answered(
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await response.read(),
            )

    async def get(self, path: str) -> Answered:
        async with self.http.get(self.url + path) as response:
            return Answered(response.status, {}, await response.read())

    @property
    def load(self) -> list[list[int]]:
        table = self.service.view.target_table("demo")
        return self.service.scheduler.reservations.load(table.rows, self.service.clock()).tolist()  # type: ignore[no-any-return]

    def column(self, rank: str) -> list[int]:
        """Return the load of one rank, "a/0" or "a/1"."""
        return [row[int(rank[-1])] for row in self.load]


NOTHING = [[0, 0]] * 4


def reported(running: int, held: Sequence[int] = (0, 0, 0, 0)) -> list[int]:
    """Return the load of a rank that reported as in `RouterGroup.report`, plus its bookings. A sequence is
    expected to emit 64 more tokens.
    """
    return [own + more for own, more in zip((10, running, 100, 64 * running), held, strict=True)]


class RouterGroup:
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
        await self.bus.publisher(self.subjects.heartbeats("a")).publish(
            EngineHeartbeat(engine="a", worker_id=self.joined.worker_id, epoch=0)
        )

    async def report(self, busy: str, *endpoints: RouterEndpoint, running: int) -> None:
        """Let both ranks report this many running requests, 100 blocks and 10 prompt tokens, `busy`
        (engine/rank) before the other. Return once the routers have applied it.
        """
        assert self.joined is not None
        ranks = [int(busy[-1]), 1 - int(busy[-1])]
        for rank in ranks:
            load = KvMetrics(
                worker_id=self.joined.worker_id,
                dp_rank=rank,
                running=running,
                active_decode_blocks=100,
                active_prefill_tokens=10,
            )
            await self.bus.publisher(self.subjects.kv_metrics).publish(load)
        await until(
            lambda: all(endpoint.column(f"a/{ranks[1]}") == reported(running) for endpoint in endpoints)
        )

    async def router(self, **settings: Any) -> RouterEndpoint:
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
        return RouterEndpoint(service, url, http)


@pytest.fixture(autouse=True)
def quick_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten waits: on a memory bus other routers answer at once."""
    monkeypatch.setattr(peer_routers, "MEETING_SECONDS", 0.02)


@pytest.fixture
async def group() -> AsyncIterator[RouterGroup]:
    async with contextlib.AsyncExitStack() as stack:
        group = RouterGroup(stack)
        await group.engine()
        yield group


AGENT_OFTEN = dataclasses.replace(AGENT, load_seconds=0.02)
DIFFERS = {
    "id",
    "request_id",
    "seed",
    "chosen",
    "runner_up",
    "if_gone",
    "without",
    "url",
    "expires_seconds",
    "candidates",
}


def alike(record: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that must be equal for every interface."""
    return {name: value for name, value in record.items() if name not in DIFFERS}


async def test_what_is_reserved_is_booked_until_it_is_released_whatever_ranks_report_meanwhile(
    group: RouterGroup,
) -> None:
    endpoint = await group.router(settle_seconds=0.0)
    answer = await endpoint.post("/v1/route/reserve", chat())
    record = answer.json
    assert answer.status == 200
    assert answer.headers["x-roost-decision-id"] == record["id"]
    assert (record["url"], record["expires_seconds"]) == (
        {"a/0": "http://h:1", "a/1": "http://h:2"}[record["chosen"]],
        120.0,
    )
    held, chosen = [max(row) for row in endpoint.load], record["chosen"]
    assert held[PREFILL] > 0
    assert held[SEQUENCES] == 1
    assert (await endpoint.get(f"/v1/decisions/{record['id']}")).json["chosen"] == chosen
    for number in (3, 0, 5):
        await group.report(chosen, endpoint, running=number)
        assert endpoint.column(chosen) == reported(number, held)
    noted = await endpoint.post("/v1/route/release", {"id": record["id"], "first_token": True})
    assert (noted.status, noted.json) == (200, {"id": record["id"], "outcome": "noted"})
    assert endpoint.column(chosen) == reported(
        5, [0, 0, 0, held[STEPS]]
    )  # this report may contain the booking
    await group.report(chosen, endpoint, running=6)
    assert endpoint.column(chosen) == reported(5, [0, 1, 0, held[STEPS]])  # this one does
    assert [
        (await endpoint.post("/v1/route/release", {"id": record["id"]})).json["outcome"] for _ in range(2)
    ] == ["ended", "unknown"]
    assert endpoint.column(chosen) == reported(5, [0, 1, 0, 0])  # until the rank reports its end
    await group.report(chosen, endpoint, running=5)
    assert endpoint.column(chosen) == reported(5)


async def test_a_released_reservation_takes_nothing_from_the_load_of_others(group: RouterGroup) -> None:
    endpoint = await group.router(settle_seconds=0.0)
    record = (await endpoint.post("/v1/route/reserve", chat())).json
    await group.report(record["chosen"], endpoint, running=7)
    await endpoint.post("/v1/route/release", {"id": record["id"]})
    assert endpoint.column(record["chosen"]) == reported(7)


async def test_what_another_router_holds_counts_beside_reports_here(group: RouterGroup) -> None:
    one, other = await group.router(settle_seconds=0.0), await group.router(settle_seconds=0.0)
    record = (await one.post("/v1/route/reserve", chat())).json
    chosen, held = record["chosen"], [max(row) for row in one.load]
    await until(lambda: other.load == one.load)
    await group.report(chosen, one, other, running=7)
    assert one.column(chosen) == other.column(chosen) == reported(7, held)
    await other.post("/v1/route/release", {"id": record["id"]})
    await until(lambda: one.column(chosen) == other.column(chosen) == reported(7))


async def test_forty_reservations_fill_exactly_forty_slots_of_engines_that_report() -> None:
    """Let simulated idle ranks report many times after the last reservation has settled."""
    async with contextlib.AsyncExitStack() as stack:
        group = RouterGroup(stack)
        await stack.enter_async_context(
            simulated_engine(MemoryBus(group.broker), group.subjects, agent=AGENT_OFTEN, shape="demo")
        )
        endpoint = await group.router(max_requests_per_rank=20, queue_requests=0)
        bodies = [chat(f"question {number} " + "word " * 400, model="demo") for number in range(40)]
        assert [(await endpoint.post("/v1/route/reserve", body)).status for body in bodies] == [200] * 40
        before = endpoint.load
        reports = await stack.enter_async_context(group.bus.subscribe(group.subjects.kv_metrics))
        began, seen = time.monotonic(), [0, 0]
        while min(seen) < 8 or time.monotonic() - began < 0.3:  # past `settle_seconds`
            message = (await anext(reports)).message
            assert isinstance(message, KvMetrics)
            assert not message.running
            seen[message.dp_rank] += 1
        assert endpoint.load == before
        assert before[SEQUENCES] == [20, 20]
        assert min(before[PREFILL]) > 20 * 400
        assert (await endpoint.post("/v1/route/reserve", bodies[0])).status == 429


async def test_explaining_holds_nothing(group: RouterGroup) -> None:
    endpoint = await group.router()
    assert (await endpoint.post("/v1/route", chat())).status == 200
    assert endpoint.load == NOTHING


@pytest.mark.parametrize("body", [b"", b"{}", b'{"id": 7}', b"\xff", b"[" * 5000])
async def test_a_release_that_names_nothing_is_refused(group: RouterGroup, body: bytes) -> None:
    endpoint = await group.router()
    answer = await endpoint.post("/v1/route/release", body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_value")


async def test_http_bus_and_library_explain_alike(group: RouterGroup) -> None:
    endpoint = await group.router()
    over_http = (await endpoint.post("/v1/route", chat())).json
    decided = await group.bus.request(group.subjects.route, RouteRequested(body=msgspec.json.encode(chat())))
    assert isinstance(decided, RouteDecided)
    over_bus = msgspec.json.decode(decided.record)
    as_library = msgspec.to_builtins(await Decider(endpoint.service).decide(chat()))
    assert alike(over_http) == alike(over_bus) == alike(as_library)
    assert {one["rank"]: one["terms_ms"] for one in over_http["candidates"]} == {
        one["rank"]: one["terms_ms"] for one in over_bus["candidates"]
    }
    assert decided.expires_seconds is None
    assert decided.url.startswith("http://h:")


async def test_over_the_bus_a_request_is_reserved_and_released_and_refused_with_a_status(
    group: RouterGroup,
) -> None:
    endpoint = await group.router()
    decided = await group.bus.request(
        group.subjects.route, RouteRequested(body=msgspec.json.encode(chat()), reserve=True, session="s")
    )
    assert isinstance(decided, RouteDecided)
    assert decided.expires_seconds == 120.0
    released = RouteReleased(id=msgspec.json.decode(decided.record)["id"])
    assert endpoint.load != NOTHING
    for _ in range(2):
        assert await group.bus.request(group.subjects.release, released) == released
        assert endpoint.load == NOTHING
    with pytest.raises(BusError, match="404 model_not_found"):
        await group.bus.request(
            group.subjects.route, RouteRequested(body=msgspec.json.encode(chat(model="other")))
        )
    for subject in (
        group.subjects.route,
        group.subjects.release,
        group.subjects.decision(endpoint.service.tag),
    ):
        with pytest.raises(BusError, match="is no request for this subject"):
            await group.bus.request(subject, EngineHeartbeat(engine="a", worker_id=1, epoch=0))


@pytest.mark.parametrize("first_token", [True, False])
async def test_a_release_that_reaches_another_router_is_passed_on(
    group: RouterGroup, first_token: bool
) -> None:
    one, other = await group.router(), await group.router()
    record = (await one.post("/v1/route/reserve", chat())).json
    await until(lambda: other.load == one.load)
    assert (await other.post("/v1/route/release", {"id": record["id"], "first_token": first_token})).json[
        "outcome"
    ] == "passed_on"
    await until(lambda: max(one.load[0]) == 0 and max(other.load[0]) == 0)
    await until(lambda: (one.load == other.load == NOTHING) != first_token)
    assert len(one.service.external_reservations) == first_token


async def test_a_decision_is_read_back_from_whichever_router_made_it(group: RouterGroup) -> None:
    one, other = await group.router(kept_decisions=1), await group.router()
    first, last = [(await one.post("/v1/route/reserve", chat())).json["id"] for _ in range(2)]
    assert last.startswith(one.service.tag)
    assert (await other.get(f"/v1/decisions/{last}")).json["id"] == last
    pushed_out = await other.get(f"/v1/decisions/{first}")
    assert pushed_out.status == 404
    assert "was made by another router" in pushed_out.json["error"]["message"]
    assert "not among the last 1" in pushed_out.json["error"]["message"]
    gone = await other.get(f"/v1/decisions/{int(one.service.tag, 16) ^ 1:08x}000000000000")
    assert (gone.status, "may be gone" in gone.json["error"]["message"]) == (404, True)
    older = await other.get(
        "/v1/decisions/abcd0123456789ab-a2"
    )  # the tag of a router of an older version has four digits
    assert "was made by another router (abcd)" in older.json["error"]["message"]
    assert (await other.get("/v1/decisions/nonsense")).status == 404


async def test_a_reservation_without_updates_expires(group: RouterGroup) -> None:
    endpoint = await group.router(reservation_seconds=0.3)
    await endpoint.post("/v1/route/reserve", chat())
    assert endpoint.load != NOTHING
    await until(lambda: endpoint.load == NOTHING)
    metrics = (await endpoint.get("/metrics")).body.decode()
    assert 'roost_router_reservations_ended_total{how="expired"} 1.0' in metrics
    assert "roost_router_reservations_open 0.0" in metrics


def test_an_update_of_a_reservation_extends_it() -> None:
    reservations, held = Reservations(settle_seconds=0.1, stale_seconds=5.0), ExternalReservations(10.0)
    reservations.add_rank("a")
    for name in ("x", "y"):
        held.hold(name, reservations.book("a", (1, 1, 1, 1), 0.0), 0.0)
    assert held.renew("x", 5.0) is not None
    assert len(held.due(10.0)) == 1
    assert (held.renew("y", 10.0), held.end("y")) == (None, None)
    assert len(held.due(14.9)) == 0
    assert len(held.due(15.0)) == 1
    assert (len(held), held.expired, held.released) == (0, 2, 0)


async def test_a_saturated_fleet_refuses_at_once(group: RouterGroup) -> None:
    endpoint = await group.router(max_requests_per_rank=1, queue_wait_seconds=60.0)
    for _ in range(2):
        assert (await endpoint.post("/v1/route/reserve", chat())).status == 200
    refused = await asyncio.wait_for(endpoint.post("/v1/route/reserve", chat()), 2.0)
    assert (refused.status, refused.json["error"]["code"]) == (429, "saturated")
    with pytest.raises(ApiError) as raised:
        await asyncio.wait_for(Decider(endpoint.service).reserve(chat()), 2.0)
    assert raised.value.status == 429
    assert raised.value.retry_after is not None


async def test_a_reservation_may_wait_its_turn_on_request(group: RouterGroup) -> None:
    endpoint = await group.router(max_requests_per_rank=1, queue_wait_seconds=60.0)
    held = [(await endpoint.post("/v1/route/reserve", chat())).json["id"] for _ in range(2)]
    over_http = asyncio.create_task(endpoint.post("/v1/route/reserve?wait=true", chat()))
    as_library = asyncio.create_task(Decider(endpoint.service).reserve(chat(), wait=True, priority="high"))
    await until(lambda: len(endpoint.service.wait_queue) == 2)
    await endpoint.post("/v1/route/release", {"id": held[0]})
    assert (await asyncio.wait_for(as_library, 5)).expires_seconds == 120.0
    assert not over_http.done()
    await endpoint.post("/v1/route/release", {"id": held[1]})
    assert (await asyncio.wait_for(over_http, 5)).status == 200


async def test_a_cancelled_wait_makes_no_reservation(group: RouterGroup) -> None:
    endpoint = await group.router(max_requests_per_rank=1, queue_wait_seconds=60.0)
    held = [(await endpoint.post("/v1/route/reserve", chat())).json["id"] for _ in range(2)]
    leaver = asyncio.create_task(endpoint.post("/v1/route/reserve?wait=true", chat()))
    await until(lambda: len(endpoint.service.wait_queue) == 1)
    leaver.cancel()
    await until(lambda: len(endpoint.service.wait_queue) == 0)
    for decision_id in held:
        await endpoint.post("/v1/route/release", {"id": decision_id})
    assert endpoint.load == NOTHING


@pytest.mark.parametrize("query", ["wait", "wait=1", "without=queue", "wait=true&wait=true"])
async def test_a_question_that_reserving_does_not_know_is_refused(group: RouterGroup, query: str) -> None:
    endpoint = await group.router()
    answer = await endpoint.post(f"/v1/route/reserve?{query}", chat())
    assert (answer.status, answer.json["error"]["param"]) == (400, "wait")
    assert endpoint.load == NOTHING


async def test_the_librarys_example_works_as_it_stands(group: RouterGroup) -> None:
    example = inspect.getdoc(Decider) or ""
    lines = example[example.index("    async def forwarded") :].split("\n\n")[0]
    assert len(lines.splitlines()) <= 11
    names: dict[str, Any] = {"Decider": Decider, "RouterConfig": RouterConfig}
    exec(textwrap.dedent(lines), names)
    went_to: list[str] = []

    async def forward(url: str, _: Any) -> AsyncIterator[str]:
        went_to.append(url)
        yield "token"

    beats = asyncio.create_task(_beat_on(group), name="beats a heart")
    try:
        terms = await names["forwarded"](MemoryBus(group.broker), group.subjects, chat(), forward)
    finally:
        beats.cancel()
    assert went_to[0] in ("http://h:1", "http://h:2")
    assert terms.prefill > 0


async def _beat_on(group: RouterGroup) -> None:
    while True:
        await group.beat()
        await asyncio.sleep(0.05)


async def test_a_decider_without_engines_reports_what_is_missing(group: RouterGroup) -> None:
    async with Decider.running(MemoryBus(group.broker), group.subjects) as decider:
        with pytest.raises(TimeoutError, match="a live engine"):
            await decider.ready(seconds=0.1)


async def test_a_deciders_context_passes_errors_on_as_they_are_and_its_end_is_noticed(
    group: RouterGroup,
) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Decider.running(MemoryBus(group.broker), group.subjects) as decider:
            raise KeyError("mine")
    with pytest.raises(RuntimeError, match="has ended"):
        await decider.decide(chat())
    closed = MemoryBus(group.broker)
    await closed.close()
    async with Decider.running(closed, group.subjects) as deaf:
        with pytest.raises(RuntimeError, match="has ended"):
            await deaf.ready()


async def test_the_document_describes_the_deciders_routes(group: RouterGroup) -> None:
    endpoint = await group.router()
    paths = (await endpoint.get("/openapi.json")).json["paths"]
    for path, form in (
        ("/v1/route", "DecisionRecord"),
        ("/v1/route/reserve", "ReservedRecord"),
        ("/v1/route/release", "ReleaseRecord"),
    ):
        answer = paths[path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": f"#/components/schemas/{form}"}
    names = [
        one["name"]
        for path in ("/v1/route", "/v1/route/reserve")
        for one in paths[path]["post"]["parameters"]
        if one["in"] == "query"
    ]
    assert names == ["without", "gone", "wait"]
