"""Engine spans: children of the caller's span as far as a request came when somebody records, nothing at all
otherwise."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import Ending, GenerationOutcome, RequestTimes
from engine_adapter.serving.http import RankApp
from engine_adapter.tracing import EngineTracing, HandoverTracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CALLER[:-2] + "00"
QUEUE, PREFILL, DECODE = STAGES = [f"roost.engine.{stage}" for stage in ("queue", "prefill", "decode")]
Starter = Callable[..., AbstractAsyncContextManager[Any]]


def outcome(reason: Ending = "length", admitted: int = 20, first_token: int = 50) -> GenerationOutcome:
    return GenerationOutcome(
        reason=reason,
        prompt_tokens=40,
        completion_tokens=7,
        cached_tokens=32,
        preemptions=1,
        moments=RequestTimes(submitted=10, admitted=admitted, first_token=first_token, finished=90),
        failure=EngineFailed("rank 0 is gone") if reason == "failed" else None,
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_a_request_has_three_spans_end_to_end_under_its_caller(recorded: InMemorySpanExporter) -> None:
    EngineTracing(engine="one", rank=1, model="demo").record(CALLER, outcome())
    spans = recorded.get_finished_spans()
    assert [(span.name, span.start_time, span.end_time) for span in spans] == [
        ("roost.engine.queue", 10, 20),
        ("roost.engine.prefill", 20, 50),
        ("roost.engine.decode", 50, 90),
    ]
    assert {
        (span.parent.span_id, span.context.trace_id)
        for span in spans
        if span.parent is not None and span.context is not None
    } == {(0xB7AD6B7169203331, 0x0AF7651916CD43DD8448EB211C80319C)}
    together: dict[str, object] = {}
    for span in spans:
        together.update(span.attributes or {})
    assert together == {
        "roost.engine": "one",
        "roost.rank": 1,
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 7,
        "roost.cached_tokens": 32,
        "roost.preemptions": 1,
        "roost.outcome": "length",
    }


@pytest.mark.parametrize("caller", [None, NOT_SAMPLED])
def test_what_nobody_traces_makes_no_span(recorded: InMemorySpanExporter, caller: str | None) -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(caller, outcome())
    assert recorded.get_finished_spans() == ()


@pytest.mark.parametrize("reason", ["cancelled", "failed"])
@pytest.mark.parametrize(
    ("admitted", "first_token", "begins"), [(0, 0, [10]), (20, 0, [10, 20]), (20, 50, [10, 20, 50])]
)
def test_a_request_that_ends_early_has_spans_as_far_as_it_came(
    recorded: InMemorySpanExporter, reason: Ending, admitted: int, first_token: int, begins: list[int]
) -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(CALLER, outcome(reason, admitted, first_token))
    spans = recorded.get_finished_spans()
    assert [(span.name, span.start_time, span.end_time) for span in spans] == list(
        zip(STAGES, begins, [*begins[1:], 90], strict=False)
    )
    assert outcomes_of(spans) == [None] * (len(begins) - 1) + [reason]
    assert all(span.status.is_ok or span.status.is_unset for span in spans[:-1])
    assert (spans[-1].status.description, (spans[-1].attributes or {}).get("error.type")) == (
        ("rank 0 is gone", "EngineFailed") if reason == "failed" else (None, None)
    )


def test_a_request_that_the_engine_never_had_makes_no_span(recorded: InMemorySpanExporter) -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(CALLER, None)
    assert recorded.get_finished_spans() == ()


def test_without_a_provider_recording_raises_nothing() -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(CALLER, outcome())


def outcomes_of(spans: Sequence[ReadableSpan]) -> list[object]:
    return [(span.attributes or {}).get("roost.outcome") for span in spans]


def traced(engine: Any) -> RankApp:
    return RankApp(engine, EngineTracing(engine="one", rank=0, model="pretend"))


async def post(app: RankApp, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://rank", timeout=10
    ) as client:
        return await client.post(
            "/v1/completions", json={"prompt": "a prompt", **body}, headers={"traceparent": CALLER}
        )


async def one_waits(engine: Any) -> None:
    async with asyncio.timeout(5):
        while not engine.take_facts().load.waiting:
            await engine.wait_facts()


class Vanishing:
    """A client that closes the connection when told to."""

    def __init__(self, app: RankApp, **body: Any) -> None:
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": json.dumps({"prompt": "a prompt", **body}).encode()}
        ]
        self._gone = asyncio.Event()
        self.answered = asyncio.Event()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"traceparent", CALLER.encode())],
        }
        self._served = asyncio.create_task(
            app(scope, self._receive, self._send), name="serves a client that vanishes"
        )

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.answered.set()

    async def vanish(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self._served, 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_read_to_its_end_leaves_its_spans_once(
    pretend_engine: Starter, recorded: InMemorySpanExporter, stream: bool
) -> None:
    async with pretend_engine() as started:
        assert (await post(traced(started.engine), max_tokens=5, stream=stream)).status_code == 200
    spans = recorded.get_finished_spans()
    assert [span.name for span in spans] == STAGES
    assert outcomes_of(spans) == [None, None, "length"]


async def test_clients_that_vanish_leave_spans_of_what_was_done_for_them(
    pretend_engine: Starter, recorded: InMemorySpanExporter
) -> None:
    async with pretend_engine(max_running=1) as started:
        app = traced(started.engine)
        served = Vanishing(app, max_tokens=400, stream=True)
        await served.answered.wait()
        waiting = Vanishing(app, max_tokens=400)
        await one_waits(started.engine)
        await waiting.vanish()
        in_the_queue = recorded.get_finished_spans()
        await served.vanish()
    assert [span.name for span in in_the_queue] == [QUEUE]
    assert outcomes_of(in_the_queue) == ["cancelled"]
    while_decoding = recorded.get_finished_spans()[1:]
    assert [span.name for span in while_decoding] == STAGES
    assert outcomes_of(while_decoding) == [None, None, "cancelled"]
    assert int((while_decoding[-1].attributes or {})["gen_ai.usage.output_tokens"]) > 0  # type: ignore[arg-type]


async def test_a_failing_engine_leaves_spans_that_say_why(
    pretend_engine: Starter, recorded: InMemorySpanExporter
) -> None:
    async with pretend_engine(max_running=1) as started:
        app = traced(started.engine)
        served = Vanishing(app, max_tokens=400, stream=True)
        await served.answered.wait()
        waiting = asyncio.create_task(post(app, max_tokens=400), name="waits behind it")
        await one_waits(started.engine)
        started.runner.failure = ArithmeticError("no numbers")
        assert (await waiting).status_code == 503
        await served.vanish()
    spans = recorded.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted([*STAGES, QUEUE])
    ended_in = [span for span in spans if "roost.outcome" in (span.attributes or {})]
    assert sorted(span.name for span in ended_in) == [DECODE, QUEUE]
    assert outcomes_of(ended_in) == ["failed", "failed"]
    assert all("no numbers" in (span.status.description or "") for span in ended_in)


async def test_a_request_that_its_first_forward_pass_fails_ended_in_prefill(
    pretend_engine: Starter, recorded: InMemorySpanExporter
) -> None:
    async with pretend_engine() as started:
        started.runner.failure = ArithmeticError("no numbers")
        assert (await post(traced(started.engine), max_tokens=5)).status_code == 503
    assert [span.name for span in recorded.get_finished_spans()] == [QUEUE, PREFILL]
    assert outcomes_of(recorded.get_finished_spans()) == [None, "failed"]


def test_a_part_of_staging_is_a_span_under_its_handover_and_says_what_went_wrong(
    recorded: InMemorySpanExporter,
) -> None:
    tracing = HandoverTracing(engine="one", rank=1)
    tracing.stage(CALLER, "pull", 10, {"roost.source": 0, "roost.bytes": 99}, "the source is gone")
    tracing.stage(CALLER, "prepare", 20, {}, "")
    tracing.stage(NOT_SAMPLED, "prepare", 20, {}, "")
    pull, prepare = recorded.get_finished_spans()
    assert (pull.name, pull.start_time, prepare.name) == ("roost.handover.pull", 10, "roost.handover.prepare")
    assert pull.attributes == {"roost.engine": "one", "roost.rank": 1, "roost.source": 0, "roost.bytes": 99}
    assert pull.parent is not None
    assert pull.parent.span_id == 0xB7AD6B7169203331
    assert (pull.status.status_code, pull.status.description) == (
        trace.StatusCode.ERROR,
        "the source is gone",
    )
    assert prepare.status.is_unset
