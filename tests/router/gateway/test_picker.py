"""The endpoint picker before servers that speak text, asked by a proxy over gRPC."""

import json
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from fleet.completions import DECISION_HEADER
from router.access.api_keys import INFER, key_line
from router.gateway.messages import HealthCheckRequest, HealthCheckResponse, ProcessingRequest
from router.gateway.picker import EndpointPicker
from router.gateway.protocol import BodyMode
from router.gateway.server import EXT_PROC, HEALTH, GatewayServer
from router.health.attempt_failures import AttemptFailure
from tests.router.foreign_servers import ForeignServer, in_front_of, saying, serving, streaming
from tests.router.gateway.proxy import Proxy, gateway, head, picking
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, metric, until

FULL, BUFFERED = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
SAID = json.dumps({"id": "x", "choices": [], "usage": USAGE}).encode()
EVENTS = [b'data: {"choices": []}\n\n', b"data: " + SAID + b"\n\n", b"data: [DONE]\n\n"]


def body(**more: Any) -> bytes:
    return json.dumps(chat(**more)).encode()


def endpoint(server: ForeignServer) -> str:
    return server.url.removeprefix("http://")


async def nothing_is_booked(house: House) -> None:
    """Wait until no rank has a booking."""
    view = house.service.view

    def empty() -> bool:
        table = view.target_table("demo")
        load = house.service.scheduler.reservations.load(table.rows, house.service.clock())
        return not load.any()

    await until(empty)


def booked(house: House) -> int:
    """Requests that are booked."""
    table = house.service.view.target_table("demo")
    return int(house.service.scheduler.reservations.load(table.rows, house.service.clock())[1].sum())


@pytest.mark.parametrize("mode", [FULL, BUFFERED])
@pytest.mark.parametrize("answer_mode", [FULL, BodyMode.STREAMED, BodyMode.NONE])
async def test_a_request_goes_to_the_endpoint_that_header_and_metadata_name(
    open_house: OpenHouse, mode: BodyMode, answer_mode: BodyMode
) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            exchange = proxy.open(mode, answer_mode)
            picked = await exchange.ask(body(), pieces=1 if mode is BUFFERED else 3)
            assert picked.endpoint == picked.metadata == endpoint(server)
            assert booked(house) == 1
            assert picked.phases[0] == "request_headers"
            if mode is FULL:
                assert picked.body == body()
            pieces = [] if answer_mode is BodyMode.NONE else [SAID]
            assert await exchange.report(200, "application/json", pieces) == b"".join(pieces)
            await nothing_is_booked(house)
            assert await exchange.hear() is None
        decision = picked.headers[DECISION_HEADER]
        assert (await house.get(f"/v1/decisions/{decision}")).json["model"] == "demo"
        assert metric(house.service.metrics, "requests_total", outcome="answered") == 1


async def test_the_server_gets_the_clients_body_and_the_client_the_servers_answer(
    open_house: OpenHouse,
) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            exchange = proxy.open()
            sent = body(content="x" * 300_000)
            await exchange.ask(sent, pieces=7)
            assert await exchange.forward(house.http) == SAID
        assert server.requests[0].body == sent
        assert server.requests[0].header("x-request-id")


async def test_what_an_answer_says_of_its_tokens_is_counted(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            for content_type, pieces in (("application/json", [SAID]), ("text/event-stream", EVENTS)):
                exchange = proxy.open()
                await exchange.ask(body(stream=content_type != "application/json"))
                assert await exchange.report(200, content_type, pieces) == b"".join(pieces)
                assert await exchange.hear() is None
        assert metric(house.service.metrics, "output_tokens_total") == 6


async def test_a_request_with_trailers_is_handed_over_with_them(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            picked = await proxy.open().ask(body(), trailers=True)
    assert picked.phases == ["request_headers", "request_body", "request_trailers"]
    assert picked.body == body()


async def test_a_proxy_that_states_no_mode_is_served_in_full_duplex(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            picked = await proxy.open().ask(body(), config=False)
    assert picked.endpoint == endpoint(server)


# The gateway's choice


@pytest.mark.parametrize("form", ["list", "text", "address"])
async def test_only_endpoints_of_the_subset_are_picked(open_house: OpenHouse, form: str) -> None:
    async with (
        serving(ForeignServer("one", saying(SAID))) as one,
        serving(ForeignServer("two", saying(SAID))) as two,
    ):
        house = await in_front_of(open_house, one, two)
        async with gateway(house.service) as proxy:
            for server in (one, two, one):
                named: Any = {
                    "list": ["10.9.9.9:1", endpoint(server)],
                    "text": f"10.9.9.9:1, {endpoint(server)}",
                    "address": ["10.9.9.9", "127.0.0.1"],
                }[form]
                picked = await proxy.open().ask(body(), subset=named)
                allowed = {endpoint(one), endpoint(two)} if form == "address" else {endpoint(server)}
                assert picked.endpoint in allowed


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], "not an endpoint", 5])
async def test_a_subset_without_an_eligible_endpoint_is_answered_503(
    open_house: OpenHouse, subset: Any
) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            picked = await proxy.open().ask(body(), subset=subset)
    assert picked.refused == 503
    assert not booked(house)


async def test_a_server_with_a_name_instead_of_an_address_is_not_picked(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        server.url = server.url.replace("127.0.0.1", "localhost")
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            picked = await proxy.open().ask(body())
    assert picked.refused == 503
    assert b"address" in picked.text


# Refusals


async def test_a_full_fleet_is_answered_429_with_the_time_to_ask_again(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server, max_requests_per_rank=1, queue_requests=0)
        async with gateway(house.service) as proxy:
            first = proxy.open()
            assert not (await first.ask(body())).refused
            picked = await proxy.open().ask(body())
            assert picked.refused == 429
            assert json.loads(picked.text)["error"]["code"] == "saturated"
            assert int(picked.headers["retry-after"]) >= 1
            await first.report(200, "application/json", [SAID])
            await nothing_is_booked(house)
            assert not (await proxy.open().ask(body())).refused


async def test_a_request_that_cannot_be_read_or_served_is_refused_with_the_routers_own_error(
    open_house: OpenHouse,
) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            for path, status in (("/sleep", 404), ("/v1/files", 404), ("/v1/embeddings", 0)):
                assert (await proxy.open().ask(b'{"model": "demo"}', path=path)).refused == status
            for mode in (BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.NONE):
                picked = await proxy.open(mode).ask(body())
                assert picked.refused == 500
                assert b"FULL_DUPLEX_STREAMED" in picked.text


async def test_models_are_listed_by_the_router(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            asked = head("/v1/models", {}, FULL, FULL, method="GET", ends=True)
            (answer,) = await proxy.ask_once(asked.SerializeToString())
        assert answer.immediate_response.status.code == 200
        assert json.loads(answer.immediate_response.body) == (await house.get("/v1/models")).json


async def test_ranks_that_take_token_ids_are_not_offered(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("engine", [rank.url], byte_archive)
    async with gateway(house.service) as proxy:
        picked = await proxy.open().ask(body())
    assert picked.refused == 404
    assert b"token ids" in picked.text


async def test_a_body_beyond_the_limit_is_refused(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server, max_body_bytes=1000)
        async with gateway(house.service) as proxy:
            picked = await proxy.open().ask(body(content="x" * 2000))
    assert picked.refused == 413


# Keys


async def test_keys_hold_for_clients_of_a_gateway_and_stay_with_the_router(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("secret-one", "acme", None, frozenset({INFER})))
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server, api_key_file=str(keys))
        async with gateway(house.service) as proxy:
            assert (await proxy.open().ask(body())).refused == 401
            named = {"authorization": "Bearer secret-one", "x-roost-spoofed": "1", "accept-encoding": "gzip"}
            picked = await proxy.open().ask(body(), headers=named)
    assert picked.endpoint == endpoint(server)
    assert {"authorization", "x-roost-spoofed", "accept-encoding"} <= set(picked.removed)
    assert picked.headers["x-tenant-id"] == "acme"


# Failures


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_server_that_fails_counts_as_failed(open_house: OpenHouse, status: int) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            exchange = proxy.open()
            await exchange.ask(body())
            await exchange.report(status, "application/json", [b"{}"])
            assert await exchange.hear() is None
        await nothing_is_booked(house)
        how = AttemptFailure.BUSY if status == 429 else AttemptFailure.SERVER_ERROR
        assert metric(house.service.metrics, "retries_total", cause=how.value) == 1


@pytest.mark.parametrize("mode", [FULL, BUFFERED])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("after", ["head", "decision", "answer head", "answer"])
async def test_a_client_that_vanishes_frees_its_booking(
    open_house: OpenHouse, after: str, mode: BodyMode, in_order: bool
) -> None:
    async with serving(ForeignServer("one", streaming(*EVENTS))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            exchange = proxy.open(mode)
            if after == "head":
                await exchange.say(head("/v1/chat/completions", {}, mode, FULL))
                await until(lambda: house.service.metrics.in_flight)
            else:
                await exchange.ask(body(stream=True))
                assert booked(house) == 1
            if after in ("answer head", "answer"):
                pieces = [EVENTS[0]] if after == "answer" else []
                await exchange.report_begun(pieces)
            if in_order:
                await exchange.leave()
            else:
                exchange.vanish()
            await nothing_is_booked(house)
            await until(lambda: not house.service.metrics.in_flight)
        assert metric(house.service.metrics, "requests_total", outcome="client_gone") == 1


async def test_mutated_messages_end_their_own_stream_alone(open_house: OpenHouse) -> None:
    chance = random.Random(5)
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            whole = [head("/v1/chat/completions", {"a": "b"}, FULL, FULL, ["127.0.0.1"]).SerializeToString()]
            whole.append(_body_message(body()))
            for _ in range(1000):
                await proxy.ask_once(*(_mutated(message, chance) for message in whole))
            await nothing_is_booked(house)
            assert (await proxy.open().ask(body())).endpoint == endpoint(server)
            await until(lambda: house.service.metrics.in_flight <= 1)


def _body_message(content: bytes) -> bytes:
    message = ProcessingRequest()
    message.request_body.body = content
    message.request_body.end_of_stream = True
    data: bytes = message.SerializeToString()
    return data


def _mutated(message: bytes, chance: random.Random) -> bytes:
    """The same with some bytes changed, cut off, doubled or left out."""
    data = bytearray(message)
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(data)) if data else 0
        match chance.randrange(4):
            case 0 if data:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randint(1, 9)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 9)]
            case _:
                data = data[: chance.randint(0, len(data))]
    return bytes(data)


# Health and TLS


async def test_health_follows_readiness(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with gateway(house.service) as proxy:
            assert [await _health(proxy, name) for name in ("", "liveness", "readiness", EXT_PROC)] == [1] * 4
            house.service.draining = True
            assert [await _health(proxy, name) for name in ("", "liveness", "readiness", EXT_PROC)] == [
                2,
                1,
                2,
                2,
            ]
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await _health(proxy, "unknown")
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def _health(proxy: Proxy, service: str) -> int:
    check = proxy.channel.unary_unary(f"/{HEALTH}/Check")
    answer = await check(HealthCheckRequest(service=service).SerializeToString())
    status: int = HealthCheckResponse.FromString(answer).status
    return status


async def test_a_renewed_certificate_serves_the_next_connection(open_house: OpenHouse) -> None:
    authorities = [trustme.CA(), trustme.CA()]
    certificates = [ca.issue_cert("localhost", "127.0.0.1") for ca in authorities]
    now = [0]

    def certificate() -> tuple[bytes, bytes]:
        found = certificates[now[0]]
        chain = b"".join(blob.bytes() for blob in found.cert_chain_pems)
        return chain, found.private_key_pem.bytes()

    async with serving(ForeignServer("one", saying(SAID))) as server:
        house = await in_front_of(open_house, server)
        async with picking(house.service, certificate=certificate) as address:
            for number, ca in enumerate(authorities):
                now[0] = number
                trusted = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
                options = (("grpc.use_local_subchannel_pool", 1),)
                async with grpc.aio.secure_channel(address, trusted, options=options) as channel:
                    assert await _health(Proxy(channel), EXT_PROC) == 1


async def test_an_address_in_use_is_named(open_house: OpenHouse) -> None:
    house = await open_house(bus=False)
    async with picking(house.service) as address:
        with pytest.raises(OSError, match=address):
            await _open_at(house, address)


async def _open_at(house: House, address: str) -> None:
    await GatewayServer.open(EndpointPicker(house.service), address, max_body_bytes=1)
