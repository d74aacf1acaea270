"""One trace per request: nested spans, complete and consistent terms, context propagation; and no cost when
off.
"""

import asyncio
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode, format_span_id

from fleet.blocks import local_hashes, sequence_hashes
from fleet.requests.routing import RouteRequested
from router.access.api_keys import key_line
from router.api.bus_api import BusApi
from router.api.library import Decider
from router.scheduling.cost import TERMS
from router.telemetry.tracing import RouterTracing
from tests.router.learnt_tables import halves, published_clusters, tables
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, rendered, until

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traces:
    """Spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    async def server(self, name: str = "chat demo") -> ReadableSpan:
        await until(lambda: self.named(name))
        return self.named(name)[0]


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
async def house(open_house: OpenHouse, traces: Traces) -> House:
    return await open_house(tracer_provider=traces.provider)


async def engines(house: House, serve_rank: Serve, packed: bytes, count: int = 2) -> list[MockRank]:
    ranks = [await serve_rank(MockRank(packed)) for _ in range(count)]
    for number, rank in enumerate(ranks):
        await house.join(f"engine{number}", [rank.url], packed, worker_id=2**64 - 1 - number)
    return ranks


async def test_decisions_requested_by_programs_and_over_nats_are_traced_like_http(
    house: House, serve_rank: Serve, byte_archive: bytes, traces: Traces
) -> None:
    await engines(house, serve_rank, byte_archive, 1)
    decider = Decider(house.service, tracer_provider=traces.provider)
    inquiries = BusApi(house.bus, house.subjects, decider)
    task = asyncio.create_task(inquiries.run())
    await inquiries.listening.wait()
    await decider.reserve(chat(), traceparent=PARENT)
    request = RouteRequested(body=msgspec.json.encode(chat()), reserve=True, traceparent=PARENT)
    await house.bus.request(house.subjects.route, request)
    task.cancel()
    spans = traces.named("route demo")
    assert [(about(span)["roost.interface"], about(span)["roost.outcome"]) for span in spans] == [
        ("library", "answered"),
        ("nats", "answered"),
    ]
    decisions = traces.named("roost.decide")
    for span, decision in zip(spans, decisions, strict=True):
        assert span.parent is not None
        assert format_span_id(span.parent.span_id) == PARENT.split("-")[2]
        assert span.context is not None
        assert decision.parent is not None
        assert decision.parent.span_id == span.context.span_id


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize(("rights", "continued"), [("infer,trace", True), ("infer", False)])
async def test_with_keys_only_a_caller_with_the_right_to_it_decides_on_traces(
    open_house: OpenHouse,
    traces: Traces,
    serve_rank: Serve,
    byte_archive: bytes,
    tmp_path: Path,
    rights: str,
    continued: bool,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{key_line('a key', 'acme', None, frozenset(rights.split(',')))}\n")
    sampled = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    sampled.add_span_processor(SimpleSpanProcessor(traces.exporter))
    house = await open_house(api_key_file=keys, tracer_provider=sampled)
    ranks = await engines(house, serve_rank, byte_archive)
    headers = {"traceparent": PARENT, "authorization": "Bearer a key"}
    assert (await house.post(CHAT, chat(), headers=headers)).status == 200
    sent = {
        name.lower(): value for rank in ranks for received in rank.headers for name, value in received.items()
    }
    assert bool(traces.exporter.get_finished_spans()) == continued, "who may not, cannot switch tracing on"
    assert (PARENT.split("-")[1] in sent["traceparent"], sent["traceparent"].endswith("-01")) == (
        continued,
        continued,
    )


async def test_a_caller_that_may_not_decide_on_traces_is_linked_to(
    open_house: OpenHouse, traces: Traces, serve_rank: Serve, byte_archive: bytes, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{key_line('a key', 'acme', None, frozenset({'infer'}))}\n")
    house = await open_house(api_key_file=keys, tracer_provider=traces.provider)
    await engines(house, serve_rank, byte_archive)
    await house.post(CHAT, chat(), headers={"traceparent": PARENT, "authorization": "Bearer a key"})
    server = await traces.server()
    assert server.parent is None
    assert [f"{link.context.trace_id:032x}" for link in server.links] == [PARENT.split("-")[1]]


@pytest.mark.parametrize(("rights", "passed"), [("infer,trace", True), ("infer", False)])
async def test_without_tracing_the_context_of_a_caller_without_the_right_stays_behind(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes, tmp_path: Path, rights: str, passed: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{key_line('a key', 'acme', None, frozenset(rights.split(',')))}\n")
    house = await open_house(api_key_file=keys)
    ranks = await engines(house, serve_rank, byte_archive)
    await house.post(CHAT, chat(), headers={"traceparent": PARENT, "authorization": "Bearer a key"})
    sent = {
        name.lower(): value for rank in ranks for received in rank.headers for name, value in received.items()
    }
    assert (sent.get("traceparent") == PARENT) == passed


async def test_a_request_is_one_trace_under_the_clients_own(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    ranks = await engines(house, serve_rank, byte_archive)
    answer = await house.post(
        CHAT,
        chat(temperature=0.5),
        headers={"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "r-9"},
    )
    server = await traces.server()
    [decide], [forward] = traces.named("roost.decide"), traces.named("roost.forward")
    assert (server.kind, decide.kind, forward.kind) == (SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.CLIENT)
    assert server.context is not None
    assert server.parent is not None
    assert (f"{server.context.trace_id:032x}", f"{server.parent.span_id:016x}") == tuple(
        PARENT.split("-")[1:3]
    )
    for child in (decide, forward):
        assert child.parent is not None
        assert child.parent.span_id == server.context.span_id
    sent = {
        name.lower(): value for rank in ranks for received in rank.headers for name, value in received.items()
    }
    assert forward.context is not None
    assert sent["traceparent"] == f"00-{server.context.trace_id:032x}-{forward.context.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=1"
    attributes = about(server)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "demo"
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (12, 0.5)
    assert attributes["gen_ai.usage.output_tokens"] == 12
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.response.id"] == answer.json["id"]
    assert (
        attributes["http.response.status_code"],
        attributes["roost.outcome"],
        attributes["roost.request.id"],
    ) == (200, "answered", "r-9")
    assert attributes["roost.decision.id"] == answer.headers["x-roost-decision-id"]
    assert (forward.start_time or 0) >= (decide.end_time or 0) - 2_000_000
    assert (server.start_time or 0) <= (decide.start_time or 0)


async def test_the_decision_span_carries_every_candidates_terms_and_they_add_up(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    await engines(house, serve_rank, byte_archive, 3)
    answer = await house.post(CHAT, chat())
    await traces.server()
    [decide] = traces.named("roost.decide")
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    candidates = [dict(event.attributes or {}) for event in decide.events]
    assert len(candidates) == 3
    for attributes, kept in zip(candidates, record["candidates"], strict=True):
        assert attributes["roost.candidate"] == f"{kept['engine']}/{kept['rank']}"
        assert attributes["roost.worker_id"] == kept["worker_id"]
        terms = [attributes[f"roost.term.{name}_ms"] for name in TERMS]
        assert terms == list(kept["terms_ms"].values())
        assert reduce(add, (float(str(term)) for term in terms)) == attributes["roost.score"] == kept["score"]
    attributes = about(decide)
    assert attributes["roost.chosen"] == record["chosen"]
    assert attributes["roost.runner_up"] == record["runner_up"]
    assert attributes["roost.margin"] == record["margin"]
    assert attributes["roost.decision.id"] == record["id"]
    assert set(attributes["roost.epoch.placement"]) == {"engine0:0", "engine1:0", "engine2:0"}


async def test_the_decision_span_contains_the_prediction_and_its_sources(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    ranks = await engines(house, serve_rank, byte_archive)
    prefix = sequence_hashes(local_hashes(ranks[0].tokenizer.encode_rendered(rendered("hello there")), 4))[0]
    await house.bus.publisher(house.subjects.clusters).publish(published_clusters(halves(version=3)))
    await house.bus.publisher(house.subjects.tables).publish(
        tables(8, clusters=3, gain=0.25, blocks={prefix: ((0.9, 0.1), 48.0)})
    )
    await until(
        lambda: (
            house.service.view.prices("demo").priced.all()
            and house.service.scheduler.predictor.replica("demo") is not None
        )
    )
    await house.post(CHAT, chat())
    await traces.server()
    [decide] = traces.named("roost.decide")
    attributes = about(decide)
    assert [one.split(":")[0] for one in attributes["roost.prediction.clusters"]] == ["0", "1"]
    assert attributes["roost.prediction.known_blocks"] == 1
    assert attributes["roost.prediction.prefix"] == str(prefix)
    assert attributes["roost.prediction.sources"] == ("prefix: 48 tokens, confidence 0.375",)
    assert (
        attributes["roost.prediction.best"],
        attributes["roost.prediction.gain"],
        attributes["roost.prediction.confidence"],
    ) == ("prefix", 0.25, 0.375)
    assert (attributes["roost.epoch.tables"], attributes["roost.epoch.clusters"]) == (8, 3)
    for event in decide.events:
        attributes = dict(event.attributes or {})
        assert attributes["roost.local_share"] == pytest.approx(1.0), (
            "the one rank of an engine holds all of its experts"
        )
        assert attributes["roost.remote_ranks"] == 0


async def test_each_attempt_has_a_decision_and_a_forward_span_of_its_own(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    for rank in await engines(house, serve_rank, byte_archive):
        rank.die_after = 4
    answer = await house.post(CHAT, chat(stream=True))
    assert answer.events[-1]["error"]
    server = await traces.server()
    assert len(traces.named("roost.decide")) == len(traces.named("roost.forward")) == 2
    assert [about(span)["error.type"] for span in traces.named("roost.forward")] == ["broken", "broken"]
    second = about(traces.named("roost.decide")[1])
    assert (second["roost.attempt"], second["roost.cause"]) == (2, "broken")
    assert second["roost.replaces"] == about(traces.named("roost.decide")[0])["roost.decision.id"]
    assert server.status.status_code is StatusCode.ERROR
    assert about(server)["error.type"] == "broken"


async def test_a_refused_request_is_traced_too(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    await engines(house, serve_rank, byte_archive, 1)
    await house.post(CHAT, b"{")
    server = await traces.server("chat")
    assert about(server)["http.response.status_code"] == 400
    assert server.status.status_code is StatusCode.UNSET
    await house.post("/v1/completions", {"model": "unknown", "prompt": "x"})
    assert about(await traces.server("text_completion unknown"))["roost.outcome"] == "refused"


async def test_explaining_makes_no_forward_span(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    await engines(house, serve_rank, byte_archive)
    await house.post("/v1/route", chat())
    await traces.server("route demo")
    assert not traces.named("roost.forward")


async def test_numbers_of_64_bits_are_text(
    house: House, traces: Traces, serve_rank: Serve, byte_archive: bytes
) -> None:
    await engines(house, serve_rank, byte_archive, 1)
    await house.post(CHAT, chat())
    await traces.server()
    assert about(traces.named("roost.forward")[0])["roost.worker_id"] == str(2**64 - 1)


def test_without_a_real_provider_no_span_is_ever_made() -> None:
    assert RouterTracing.create(NoOpTracerProvider()) is None
    assert RouterTracing.create() is None, "the process's own provider is a proxy until somebody sets one"


async def test_a_sampled_out_request_costs_no_candidate_events(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    traces = Traces()
    quiet = TracerProvider(sampler=ALWAYS_OFF)
    quiet.add_span_processor(SimpleSpanProcessor(traces.exporter))
    house = await open_house(tracer_provider=quiet)
    [rank] = await engines(house, serve_rank, byte_archive, 1)
    assert (await house.post(CHAT, chat())).status == 200
    assert not traces.exporter.get_finished_spans()
    flags = {name.lower(): value for name, value in rank.headers[0].items()}["traceparent"][-2:]
    assert not int(flags, 16) & 1
