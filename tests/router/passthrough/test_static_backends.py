"""Static backends: no bus, no agents, bodies and answers unchanged, failures before and after the first
byte."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from fleet.facts.engines import Capabilities
from router.access.api_keys import key_line
from router.config import BackendConfig, RouterConfig
from tests.conftest import free_port
from tests.router.router_fixture import (
    House,
    MockRank,
    OpenHouse,
    Serve,
    chat,
    engine_joined,
    until,
)
from tests.web_server import served_web

CHAT = "/v1/chat/completions"
_NOTHING = Capabilities(kv_events=False, load=False, experts=False, token_ids=False)


class Foreign:
    """Server that Roost does not run; its answers have unknown fields."""

    def __init__(self, name: str, models: tuple[str, ...] = ("demo",)) -> None:
        self.name = name
        self.models = models
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.break_after: int | None = None
        self.hold = False
        self.listed: asyncio.Event | None = None
        """once set, the list of models is answered; None: at once"""
        self.lists = 0
        self.words = 4
        self.together = 0
        """requests that must have arrived before the first one is answered"""
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self.port = free_port()
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.chat)
        await self._stack.enter_async_context(served_web(app, self.port))

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def list(self, http: web.Request) -> web.Response:
        self.lists += 1
        if self.listed is not None:
            await self.listed.wait()
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": model, "max_model_len": 100, **self.card(model)} for model in self.models],
            }
        )

    def card(self, model: str) -> dict[str, Any]:
        """Return further fields of a model, in vLLM's form, with another time in each answer."""
        parent = self.models[0] if model != self.models[0] else None
        return {
            "created": 1_700_000_000 + self.lists,
            "root": f"/models/{model}",
            "parent": parent,
            "permission": [{"allow_sampling": True}],
        }

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        if len(self.bodies) >= self.together:
            self.arrived.set()
        await self.arrived.wait()
        if json.loads(body)["model"] not in self.models:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if self.status != 200:
            return web.json_response(
                {"error": {"message": f"{self.name} says {self.status}", "code": "c", "param": "p"}},
                status=self.status,
            )
        if not json.loads(body).get("stream"):
            return await self._whole(http)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-vendor": "its own"})
        await response.prepare(http)
        try:
            for number in range(self.words):
                if number == self.break_after:
                    assert http.transport is not None
                    http.transport.abort()
                    break
                await response.write(
                    "data:"
                    f' {{"id":"{self.name}","choices":[{{"delta":{{"content":"w{number}"}},"vendor":1}}]}}\n\n'.encode()
                )
                if self.hold:
                    await asyncio.Event().wait()
            await response.write(
                b"data:"
                b' {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4,"total_tokens":11}}\n\ndata:'
                b" [DONE]\n\n"
            )
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response

    async def _whole(self, http: web.Request) -> web.StreamResponse:
        text = json.dumps(
            {
                "id": self.name,
                "choices": [],
                "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
                "vendor": {"x": [1]},
            }
        )
        if self.break_after is None:
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse(
            headers={"content-type": "application/json", "content-length": str(len(text))}
        )
        await response.prepare(http)
        await response.write(text[:10].encode())
        assert http.transport is not None
        http.transport.abort()
        return response


@pytest.fixture
async def servers() -> AsyncIterator[list[Foreign]]:
    servers = [Foreign("one"), Foreign("two")]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


async def opened(open_house: OpenHouse, servers: list[Foreign], **settings: Any) -> House:
    settings = {"backends": tuple(server.url for server in servers)} | settings
    house = await open_house(bus=False, probe_seconds=0.05, **settings)
    await until(lambda: len(house.service.view.target_table("demo").targets) == len(servers))
    return house


@pytest.mark.parametrize("isolates", [True, False])
async def test_a_declared_server_gets_the_salt_and_any_other_the_body_as_it_came(
    open_house: OpenHouse, servers: list[Foreign], tmp_path: Path, isolates: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("acme", "acme", None, frozenset({"infer"})))
    backend = BackendConfig(name="gpu", url=servers[0].url, isolates_tenants=isolates)
    house = await opened(open_house, servers[:1], backends=(), named_backends=(backend,), api_key_file=keys)
    body = (
        b'{ "model":"demo", "cache_salt": "own", "messages":[{"role":"user","content":"x"}], "vendor_extra":'
        b' {"deep": [1.50]} }'
    )
    assert (await house.post(CHAT, body, headers={"authorization": "Bearer acme"})).status == 200
    if not isolates:
        assert servers[0].bodies == [body]
        return
    salt = house.service.credentials.cache_salt("acme", "own")
    assert msgspec.json.decode(servers[0].bodies[0]) == msgspec.json.decode(body) | {"cache_salt": salt}
    assert b"1.50" in servers[0].bodies[0]


async def test_bodies_and_answers_pass_through_untouched(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers[:1])
    body = (
        b'{ "model":"demo", "messages":[{"role":"user","content":"x","vendor":{"a":1}}], '
        b' "tools":[{"type":"function"}], "vendor_extra": {"deep": [1.50]} }'
    )
    answer = await house.post(CHAT, body)
    assert answer.status == 200
    assert servers[0].bodies == [body]
    assert answer.json["vendor"] == {"x": [1]}
    assert answer.headers["content-type"].startswith("application/json")


async def test_streams_pass_through_byte_for_byte(open_house: OpenHouse, servers: list[Foreign]) -> None:
    house = await opened(open_house, servers[:1])
    answer = await house.post(CHAT, chat(stream=True))
    assert [event["choices"][0]["vendor"] for event in answer.events[:4]] == [1] * 4
    assert answer.headers["x-vendor"] == "its own"
    assert (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json["candidates"][0][
        "overlap_approximate"
    ]


async def test_the_models_of_the_servers_are_learnt_and_listed(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    servers[1].models = ("demo", "extra")
    house = await opened(open_house, servers)
    assert [model["id"] for model in (await house.get("/v1/models")).json["data"]] == ["demo", "extra"]
    assert (await house.post(CHAT, chat(model="extra"))).json["id"] == "two"
    assert (await house.post(CHAT, chat(model="none"))).status == 404
    servers[1].models = ("demo",)
    await until(lambda: house.service.view.models(live=True) == ["demo"])
    assert (await house.post(CHAT, chat(model="extra"))).status == 404


async def test_a_server_that_dies_is_left_out_and_comes_back(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers)
    await servers[0].stop()
    await until(lambda: len(house.service.view.target_table("demo").targets) == 1)
    assert all([(await house.post(CHAT, chat())).json["id"] == "two" for _ in range(4)])
    await servers[0].start()
    await until(lambda: len(house.service.view.target_table("demo").targets) == 2)


async def test_a_server_that_serves_stays_however_slow_its_list_of_models_is(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers[:1], probe_timeout_seconds=0.1)
    servers[0].listed, before = asyncio.Event(), servers[0].lists
    statuses = []
    while servers[0].lists < before + 8:
        statuses.append((await house.post(CHAT, chat(stream=bool(len(statuses) % 2)))).status)
    assert set(statuses) == {200}
    servers[0].listed.set()


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_another_server_is_tried_before_the_first_byte(
    open_house: OpenHouse, servers: list[Foreign], status: int
) -> None:
    house = await opened(open_house, servers)
    servers[0].status = status
    answers = [
        await house.post(CHAT, chat(f"question {number}", stream=bool(number % 2))) for number in range(4)
    ]
    assert [answer.status for answer in answers] == [200] * 4
    assert len(servers[1].bodies) == 4


async def test_a_connection_that_is_refused_costs_no_request(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers)
    await servers[0].stop()
    assert [(await house.post(CHAT, chat(f"q{number}"))).status for number in range(3)] == [200] * 3


async def test_a_stream_broken_before_its_first_byte_is_retried_elsewhere(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers)
    servers[0].break_after = 0
    answers = [await house.post(CHAT, chat(f"question {number}", stream=True)) for number in range(4)]
    assert all(len(answer.events) == 5 for answer in answers)


async def test_an_unstreamed_answer_broken_off_is_retried_elsewhere(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers)
    servers[0].break_after = 1
    assert [(await house.post(CHAT, chat(f"question {number}"))).json["id"] for number in range(4)] == [
        "two"
    ] * 4


async def test_a_stream_broken_after_its_first_byte_ends_in_an_error_event(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers[:1])
    servers[0].break_after = 2
    answer = await house.post(CHAT, chat(stream=True))
    assert [event["choices"][0]["delta"]["content"] for event in answer.events[:-1]] == ["w0", "w1"]
    assert answer.events[-1]["error"]["code"] == "upstream_failed"


async def test_what_the_server_refuses_is_passed_on(open_house: OpenHouse, servers: list[Foreign]) -> None:
    house = await opened(open_house, servers)
    for server in servers:
        server.status = 422
    answer = await house.post(CHAT, chat())
    assert answer.status == 422
    assert answer.json["error"]["message"].endswith("says 422")
    assert len(servers[0].bodies) + len(servers[1].bodies) == 1


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_when_all_fail_the_answer_is_the_last_servers_own(
    open_house: OpenHouse, servers: list[Foreign], status: int
) -> None:
    house = await opened(open_house, servers)
    for server in servers:
        server.status = status
    answer = await house.post(CHAT, chat())
    assert answer.status == status
    assert answer.json["error"]["message"] in (f"one says {status}", f"two says {status}")
    assert ("retry-after" in answer.headers) is (status != 500)


async def test_the_upstream_key_is_sent_and_the_clients_is_not(
    open_house: OpenHouse, servers: list[Foreign], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("upstream-secret\n")
    house = await opened(open_house, servers[:1], backend_key_file=key)
    traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    await house.post(
        CHAT,
        chat(),
        headers={"authorization": "Bearer clients-own", "x-request-id": "r-1", "traceparent": traceparent},
    )
    assert {headers["authorization"] for headers in servers[0].headers} == {"Bearer upstream-secret"}
    sent = next(headers for headers in servers[0].headers if "x-request-id" in headers)  # skips the probes
    assert sent["x-request-id"] == "r-1"
    assert sent["traceparent"].startswith("00-1111")


async def test_a_conversation_returns_to_the_server_that_knows_it(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers)
    long = "A long story that both of us know by heart. " * 30
    first = (await house.post(CHAT, chat(long))).json["id"]
    other = {"one": "two", "two": "one"}[first]
    followed = []
    for number in range(4):
        messages = [
            {"role": "user", "content": long},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": f"and then? {number}"},
        ]
        followed.append((await house.post(CHAT, chat(messages=messages))).json["id"])
    assert followed == [first] * 4
    assert other in {
        (await house.post(CHAT, chat(f"{number} something else entirely" * 40))).json["id"]
        for number in range(30)  # equal servers are drawn by lot
    }


async def test_a_client_that_vanishes_cancels_the_server_at_once(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers[:1])
    servers[0].hold = True
    async with house.http.post(house.url + CHAT, json=chat(stream=True)) as response:
        await response.content.readany()
    async with asyncio.timeout(2):
        await servers[0].left.wait()
    await until(lambda: house.service.scheduler.reservations.open_bookings == 0)


async def test_an_engine_without_ids_that_joins_over_the_bus_is_served_the_same_way(
    house: House, servers: list[Foreign]
) -> None:
    joined = engine_joined(
        "foreign",
        [servers[0].url + "/v1"],
        None,
        shape=None,
        placement=None,
        layout=None,
        capabilities=_NOTHING,
    )
    await house.bus.record(house.subjects.membership("foreign"), joined)
    await house.beat(joined)
    await until(lambda: house.service.ready)
    body = chat(tools=[{"type": "function"}], unknown=1)
    assert (await house.post(CHAT, body)).json["id"] == "one"
    assert json.loads(servers[0].bodies[0]) == body
    explained = (await house.post("/v1/route", chat())).json
    assert explained["candidates"][0]["experts_note"] == "the engine reports no experts"


async def test_when_engines_with_ids_serve_the_model_those_without_are_left_out(
    house: House, servers: list[Foreign], serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("ours", [rank.url], byte_archive)
    joined = engine_joined("foreign", [servers[0].url], None, capabilities=_NOTHING)
    await house.bus.record(house.subjects.membership("foreign"), joined)
    await house.beat(joined)
    await until(
        lambda: any(
            out.engine == "foreign" and "no token ids" in out.reason
            for out in house.service.view.target_table("demo").excluded
        )
    )
    assert (await house.post(CHAT, chat())).status == 200
    assert not servers[0].bodies


async def held(house: House, server: Foreign, **body: Any) -> aiohttp.ClientResponse:
    """Begin a stream at a server, and do not end it."""
    server.hold = True
    response = await house.http.post(house.url + CHAT, json=chat(stream=True, **body))
    await response.content.readany()
    return response


async def test_the_models_of_one_server_share_its_load(open_house: OpenHouse, servers: list[Foreign]) -> None:
    servers[0].models = ("demo", "adapter")
    house = await opened(open_house, servers[:1])
    stream = await held(house, servers[0], model="demo")
    other = (await house.post("/v1/route", chat(model="adapter"))).json["candidates"][0]
    assert other["load"]["requests"] == 1
    stream.close()


async def test_the_limit_of_a_named_server_holds_for_all_its_models_together(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    servers[0].models = ("demo", "adapter")
    gpu = BackendConfig(name="gpu", url=servers[0].url + "/v1", max_requests=1)
    house = await open_house(bus=False, named_backends=(gpu,), queue_requests=0)
    await until(lambda: house.service.view.models(live=True) == ["adapter", "demo"])
    assert (await house.post("/v1/route", chat(model="adapter"))).json["chosen"] == "gpu/0"
    stream = await held(house, servers[0], model="demo")
    refused = await house.post(CHAT, chat(model="adapter"))
    assert (refused.status, refused.json["error"]["code"]) == (429, "saturated")
    stream.close()


async def test_failures_with_one_model_open_the_breaker_for_the_others_of_the_server(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    for server in servers:
        server.models = ("demo", "adapter")
    house = await opened(open_house, servers, breaker_failures=1, breaker_seconds=60.0)
    servers[0].status = 500
    assert [(await house.post(CHAT, chat(f"q{number}"))).status for number in range(20)] == [200] * 20
    left_out = (await house.post("/v1/route", chat(model="adapter"))).json["excluded"]
    assert ["breaker" in out["reason"] for out in left_out] == [True]


async def test_the_list_of_models_keeps_what_the_server_says_of_each(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    servers[0].models = ("demo", "adapter")
    house = await opened(open_house, servers[:1])
    base, adapter = sorted(
        (await house.get("/v1/models")).json["data"], key=lambda card: card["parent"] or ""
    )
    assert (base["id"], base["root"], base["parent"], base["max_model_len"]) == (
        "demo",
        "/models/demo",
        None,
        100,
    )
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("adapter", "/models/adapter", "demo")
    assert adapter["permission"] == [{"allow_sampling": True}]
    assert adapter["created"] > 1_700_000_000
    assert (await house.get("/v1/models/adapter")).json["root"] == "/models/adapter"


async def test_a_list_whose_times_differ_with_each_probe_changes_nothing(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers[:1])
    version, lists = house.service.view.version, servers[0].lists
    await until(lambda: servers[0].lists >= lists + 3)
    assert house.service.view.version == version


async def test_a_prefix_of_one_model_is_no_prefix_of_another_on_the_same_server(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    servers[0].models = ("demo", "adapter")
    house = await opened(open_house, servers[:1])
    await house.post(CHAT, chat("A long story that both of us know by heart. " * 10))
    cached = []
    for model in ("demo", "adapter"):
        record = (
            await house.post(
                "/v1/route", chat("A long story that both of us know by heart. " * 10, model=model)
            )
        ).json
        cached.append(record["candidates"][0]["overlap_blocks"])
    assert cached[0] > 0
    assert cached[1] == 0


async def test_a_prefix_of_two_hundred_bytes_is_seen(open_house: OpenHouse, servers: list[Foreign]) -> None:
    house = await opened(open_house, servers[:1])
    await house.post(CHAT, chat("0123456789" * 20 + "one question"))
    record = (await house.post("/v1/route", chat("0123456789" * 20 + "and another"))).json
    assert record["candidates"][0]["overlap_blocks"] > 0


async def test_a_named_server_has_a_key_of_its_own(
    open_house: OpenHouse, servers: list[Foreign], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("own-secret\n")
    (tmp_path / "general").write_text("general-secret\n")
    named = BackendConfig(name="gpu", url=servers[0].url, key_file=tmp_path / "own")
    house = await open_house(
        bus=False,
        backends=(servers[1].url,),
        named_backends=(named,),
        policy="round_robin",
        backend_key_file=tmp_path / "general",
    )
    await until(lambda: len(house.service.view.target_table("demo").targets) == 2)
    assert {(await house.post(CHAT, chat())).json["id"] for _ in range(4)} == {"one", "two"}
    assert [{headers["authorization"] for headers in server.headers} for server in servers] == [
        {"Bearer own-secret"},
        {"Bearer general-secret"},
    ]


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"url": "host:8000"}, "url: 'host:8000' must start with http"),
        ({"max_requests": 0}, "max_requests must be a whole number of at least 1 or unset, not 0"),
        ({"prompt_tokens_per_second": 1e4}, "set both, or neither"),
        ({"sequence_ms": 1.0}, "sequence_ms needs"),
    ],
)
def test_settings_of_a_named_server_that_make_no_sense_are_refused(
    about: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        BackendConfig(**{"name": "gpu", "url": "http://host:8000", **about})


def test_a_server_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="http://host:8000 is named twice"):
        RouterConfig(
            backends=("http://host:8000/v1",),
            named_backends=(BackendConfig(name="gpu", url="http://host:8000/"),),
        )


async def test_an_idle_server_of_unknown_speed_gets_sixty_long_prompts_at_once(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers[:1])
    servers[0].together = 60
    prompts = [f"{number} " * 4 * (6000 + 50 * number) for number in range(60)]
    answers = await asyncio.gather(
        *[house.post(CHAT, chat(prompt[: 4 * (6000 + 50 * number)])) for number, prompt in enumerate(prompts)]
    )
    assert [answer.status for answer in answers] == [200] * 60


async def test_a_stated_speed_may_refuse_what_would_wait_too_long(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    slow = BackendConfig(
        name="cpu", url=servers[0].url, prompt_tokens_per_second=100.0, output_tokens_per_second=10.0
    )
    house = await open_house(bus=False, named_backends=(slow,), queue_requests=0, max_queue_seconds=5.0)
    await until(lambda: len(house.service.view.target_table("demo").targets) == 1)
    servers[0].together = 2
    first = asyncio.create_task(house.post(CHAT, chat("x " * 2000)))
    await until(lambda: len(servers[0].bodies) == 1)
    assert (await house.post(CHAT, chat())).status == 429
    servers[0].arrived.set()
    assert (await first).status == 200


async def test_no_milliseconds_are_shown_before_anything_was_measured(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers)
    record = (await house.post("/v1/route", chat("A long story that both of us know by heart. " * 30))).json
    assert record["unit"] == "1"
    for candidate in record["candidates"]:
        assert candidate["speed"] == "not measured"
        assert [candidate["terms_ms"][term] for term in ("prefill", "queue", "decode", "lockstep")] == [
            None
        ] * 4
    assert "roost_router_speed_factor{" not in (await house.get("/metrics")).body.decode()


async def test_streams_tell_the_speed_of_all_servers_of_their_model(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    house = await opened(open_house, servers, policy="round_robin")
    for server in servers:
        server.words = 40
    for number in range(12):
        await house.post(
            CHAT, chat(f"{number} A long story that both of us know by heart. " * 400, stream=True)
        )
    await until(
        lambda: house.service.scheduler.speeds.known(house.service.view.target_table("demo")).measured is None
    )
    record = (await house.post("/v1/route", chat())).json
    assert record["unit"] == "1"  # of the policy round_robin
    one, two = record["candidates"]
    assert one["speed"] == two["speed"] == "measured"
    assert one["terms_ms"]["decode"] == two["terms_ms"]["decode"] > 0


async def test_a_stated_speed_is_shown_in_milliseconds_at_once(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    gpu = BackendConfig(
        name="gpu", url=servers[0].url, prompt_tokens_per_second=20_000.0, output_tokens_per_second=50.0
    )
    house = await open_house(bus=False, named_backends=(gpu,))
    await until(lambda: len(house.service.view.target_table("demo").targets) == 1)
    record = (await house.post("/v1/route", chat("x" * 40_000, max_tokens=100))).json
    (candidate,) = record["candidates"]
    assert (record["unit"], candidate["speed"]) == ("ms", "stated")
    assert candidate["terms_ms"]["prefill"] == pytest.approx(500.0, rel=0.01)
    assert candidate["terms_ms"]["decode"] == pytest.approx(2000.0, rel=0.01)


async def test_a_server_without_a_speed_is_compared_as_if_it_were_as_fast_as_its_like_that_states_one(
    open_house: OpenHouse, servers: list[Foreign]
) -> None:
    slow = BackendConfig(
        name="cpu", url=servers[0].url, prompt_tokens_per_second=1000.0, output_tokens_per_second=4.0
    )
    house = await open_house(bus=False, named_backends=(slow,), backends=(servers[1].url,))
    await until(lambda: len(house.service.view.target_table("demo").targets) == 2)
    record = (await house.post("/v1/route", chat("x" * 40_000))).json
    scores = [candidate["score"] for candidate in record["candidates"]]
    assert scores[0] == pytest.approx(scores[1], rel=0.1)
    assert {candidate["experts_note"] for candidate in record["candidates"]} == {
        "the engine reports no experts"
    }
