"""Where spans go, and that off is off."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from deploy.telemetry.otel import SpanFile
from deploy.telemetry.tracing_config import TracingError, exporters

PROGRAM = """
import os, sys
from pathlib import Path
from opentelemetry import trace
from deploy.telemetry.tracing_config import TracingConfig, tracing
with tracing("roost-test", TracingConfig(spans=Path(sys.argv[1]) if sys.argv[1] else None), os.environ):
    tracer = trace.get_tracer("t")
    with tracer.start_as_current_span("outer", attributes={"id": str(2**64 - 1), "ms": 1.5}) as outer:
        with tracer.start_as_current_span("inner"):
            outer.add_event("said", {"what": "é"})
    print(type(trace.get_tracer_provider()).__name__, any(name.startswith("opentelemetry.sdk") for name in sys.modules))
"""


def run(spans: str, **environment: str) -> str:
    """What the program printed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, spans],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ()),
        ({"OTEL_TRACES_EXPORTER": "none"}, ()),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("console", "otlp")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("otlp",)),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ("otlp_grpc",),
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ()),
    ],
)
def test_the_standard_variables_choose_the_exporters(
    environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert exporters(environment) == expected


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER=zipkin: 'zipkin' is not known; use otlp, console or none",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "http/json: Roost sends http/protobuf or grpc",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(environment: dict[str, str], says: str) -> None:
    with pytest.raises(TracingError, match=says):
        exporters(environment)


def test_off_loads_nothing_of_the_sdk() -> None:
    assert run("") == "ProxyTracerProvider False"
    assert run("/nowhere/spans", OTEL_SDK_DISABLED="true") == "ProxyTracerProvider False"


def test_a_span_file_has_one_json_object_per_span_and_processes_share_it(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    assert run(str(file)) == "TracerProvider True"
    run(str(file), OTEL_SERVICE_NAME="other")
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(span["name"], span["service"]) for span in spans] == [
        ("inner", "roost-test"),
        ("outer", "roost-test"),
        ("inner", "other"),
        ("outer", "other"),
    ]
    inner, outer = spans[:2]
    assert inner["parent_id"] == outer["span_id"]
    assert inner["trace_id"] == outer["trace_id"] != spans[2]["trace_id"]
    assert outer["attributes"] == {"id": "18446744073709551615", "ms": 1.5}
    assert outer["events"][0]["attributes"] == {"what": "é"}
    assert outer["ms"] == pytest.approx((outer["end_ns"] - outer["start_ns"]) / 1e6)


def test_the_sampler_variable_is_obeyed(tmp_path: Path) -> None:
    run(str(tmp_path / "spans"), OTEL_TRACES_SAMPLER="always_off")
    assert (tmp_path / "spans").read_text() == ""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Sink(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Sink)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_otlp_goes_to_the_standard_endpoint(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    url, got = collector
    run("", OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert [path for path, _ in got] == ["/v1/traces"]
    assert b"outer" in got[0][1]


@pytest.mark.timeout(30)
def test_a_collector_that_is_away_delays_the_end_by_a_bound_only() -> None:
    assert run("", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1") == "TracerProvider True"


def test_otlp_goes_over_grpc_when_that_is_asked_for() -> None:
    got: list[bytes] = []

    def export(request: bytes, _: grpc.ServicerContext) -> bytes:
        got.append(request)
        return b""

    method = grpc.unary_unary_rpc_method_handler(export)
    service = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService", {"Export": method}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=(service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        run("", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    finally:
        server.stop(0).wait()
    assert len(got) == 1
    assert b"outer" in got[0]
    assert b"roost-test" in got[0]


def test_a_span_file_that_is_full_is_moved_aside_by_one_of_the_processes_that_share_it(
    tmp_path: Path,
) -> None:
    """Two exporters of one file: whoever finds it full begins the next, and the other follows."""
    file = tmp_path / "spans.jsonl"
    exporters = [SpanFile(file, max_bytes=2000) for _ in range(2)]
    provider = TracerProvider()
    tracer = provider.get_tracer("test")
    for at in range(30):
        with tracer.start_as_current_span(f"span {at}") as span:
            pass
        assert isinstance(span, ReadableSpan)
        exporters[at % 2].export([span])
    kept = [
        json.loads(line)["name"]
        for part in (f"{file}.old", file)
        for line in Path(part).read_text().splitlines()
    ]
    assert kept == [f"span {at}" for at in range(30 - len(kept), 30)]  # the latest, each once, in order
    assert 6 <= len(kept) < 30
    for exporter in exporters:
        exporter.shutdown()
