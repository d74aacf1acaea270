"""Routed experts in foreign servers' answers: read in every format, reported to the tracker, and never
delaying the answer.
"""

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from bus.memory import MemoryBus
from fleet.experts import ModelShape
from fleet.facts.activity import CountsImported, RequestsFinished, RequestsProfiled
from fleet.facts.demand import ClustersPublished
from fleet.facts.engines import Capabilities
from fleet.requests.demand import DescribePopularity, PopularityDescribed
from fleet.signatures import ClusterModel, unpack
from router.foreign_api.routed_experts_parser import (
    MARK,
    RoutedCounts,
    RoutedExpertsParser,
    TokenUsage,
    counted,
)
from tests.router.router_fixture import House, chat, engine_joined, until
from tests.web_server import served_web
from tracker.config import TrackerConfig
from tracker.service import TrackerService

CHAT = "/v1/chat/completions"
SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=1, expert_intermediate=1)
PROMPT, COMPLETION = 7, 5
USAGE = TokenUsage(PROMPT, COMPLETION, 0)
CHANCE = np.random.default_rng(0)
CHOSEN = np.array(
    [[CHANCE.choice(8, 2, replace=False) for _ in range(3)] for _ in range(PROMPT + COMPLETION - 1)], np.int32
)
"""[tokens, layers, k]: of all tokens but the last"""


def npy(table: np.ndarray) -> str:
    out = io.BytesIO()
    np.save(out, table)
    return base64.b64encode(out.getvalue()).decode()


def raw(table: np.ndarray) -> str:
    return base64.b64encode(table.astype("<i4").tobytes()).decode()


def with_dense(table: np.ndarray) -> np.ndarray:
    """Return the capture of an engine that also numbers two dense layers, the first ones."""
    return np.concatenate([np.zeros((len(table), 2, 2), table.dtype), table], axis=1)


def by_hand(table: np.ndarray) -> np.ndarray:
    counts = np.zeros((3, 8), np.int64)
    for token in table:
        for layer, experts in enumerate(token):
            for expert in experts:
                counts[layer, expert] += 1
    return counts


WAYS: dict[str, Any] = {
    "vllm": {"choices": [{"index": 0, "routed_experts": npy(CHOSEN.astype(np.uint8))}]},
    "vllm, two choices": {"choices": [{"routed_experts": npy(CHOSEN)}, {"routed_experts": npy(CHOSEN[:4])}]},
    "vllm, older": {"choices": [{"routed_experts": CHOSEN.tolist()}]},
    "vllm, prompt apart": {
        "prompt_routed_experts": npy(CHOSEN[:PROMPT]),
        "choices": [{"routed_experts": npy(CHOSEN[PROMPT:])}],
    },
    "vllm, dense layers": {"choices": [{"routed_experts": npy(with_dense(CHOSEN))}]},
    "sglang": {"choices": [{"text": "x"}], "sglext": {"routed_experts": raw(CHOSEN)}},
    "sglang, its own route": {"text": "x", "meta_info": {"routed_experts": raw(CHOSEN), "prompt_tokens": 7}},
    "sglang, dense layers": {"sglext": {"routed_experts": raw(with_dense(CHOSEN))}},
    "dynamo over vllm": {"choices": [], "nvext": {"routed_experts": CHOSEN.tolist(), "timing": {}}},
    "dynamo over sglang": {"choices": [], "nvext": {"routed_experts": raw(CHOSEN)}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("streamed", [False, True])
def test_experts_are_found_wherever_a_system_puts_them(way: str, streamed: bool) -> None:
    body = json.dumps({"id": "1", **WAYS[way]}).encode()
    found = counted(
        [b'data: {"choices": []}\n\ndata: ' + body + b"\n\ndata: [DONE]"] if streamed else [body],
        SHAPE,
        USAGE,
    )
    assert found is not None
    assert (found.tokens, found.cached) == (PROMPT + COMPLETION - 1, 0)
    np.testing.assert_array_equal(found.prompt, by_hand(CHOSEN[:PROMPT]))
    np.testing.assert_array_equal(found.completion, by_hand(CHOSEN[PROMPT:]))


@pytest.mark.parametrize("way", ["vllm", "vllm, prompt apart", "sglang"])
def test_tokens_from_the_prefix_cache_activate_nothing(way: str) -> None:
    found = counted([json.dumps(WAYS[way]).encode()], SHAPE, TokenUsage(PROMPT, COMPLETION, cached=3))
    assert found is not None
    assert (found.tokens, found.cached) == (PROMPT + COMPLETION - 1 - 3, 3)
    np.testing.assert_array_equal(found.prompt, by_hand(CHOSEN[3:PROMPT]))
    np.testing.assert_array_equal(found.completion, by_hand(CHOSEN[PROMPT:]))


def test_rows_that_begin_behind_the_cached_tokens_all_count() -> None:
    found = counted(
        [json.dumps({"choices": [{"routed_experts": npy(CHOSEN[4:])}]}).encode()],
        SHAPE,
        TokenUsage(PROMPT, COMPLETION, cached=4),
    )
    assert found is not None
    np.testing.assert_array_equal(found.prompt, by_hand(CHOSEN[4:PROMPT]))
    assert found.tokens == len(CHOSEN) - 4


def test_an_answer_without_experts_says_nothing() -> None:
    for body in (
        b"{}",
        b'{"choices": [{"text": "routed"}]}',
        b'{"choices": [{"text": "routed_experts", "routed_experts": null}]}',
        b"data: [DONE]",
    ):
        assert counted([body], SHAPE, USAGE) is None


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ("!!", "not base64"),
        (npy(CHOSEN.astype(float)), "no integers"),
        (npy(CHOSEN[:, :, :1]), "1 experts per token; the engine has 2"),
        (npy(CHOSEN[:, :2]), "2 layers"),
        (npy(CHOSEN + 1), "expected 0 to 7"),
        (raw(CHOSEN)[:-8], "no rows"),
        (raw(CHOSEN - 1), "from -1"),
        ([[1], [2, 3]], "different lengths"),
        ([[["a"]]], "expected text or integers"),
        (7, "int of shape"),
        ({"a": 1}, "dict of shape"),
        ([[[9, 9]]], "expected 0 to 7"),
    ],
)
def test_what_is_no_array_of_this_models_experts_is_refused_in_words(held: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counted([json.dumps({"choices": [{"routed_experts": held}]}).encode()], SHAPE, USAGE)


@given(
    st.binary(max_size=80),
    st.sampled_from(["choices", "sglext", "nvext", "prompt_routed_experts"]),
    st.text(max_size=60),
)
def test_garbage_is_refused_and_never_anything_else(garbage: bytes, place: str, text: str) -> None:
    experts = {"routed_experts": text}
    for body in (
        MARK + garbage,
        json.dumps(
            {place: [experts] if place == "choices" else text if place.startswith("prompt") else experts}
        ).encode()
        + garbage,
    ):
        with contextlib.suppress(ValueError):
            found = counted([body], SHAPE, USAGE)
            assert found is None or isinstance(found, RoutedCounts)


@given(
    st.lists(
        st.binary(max_size=12)
        | st.sampled_from([b"\n", b"\n\n", b"routed_", b"experts", b'data: {"routed_experts": 1}']),
        max_size=30,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_a_tap_keeps_whole_events_however_they_are_cut(pieces: list[bytes], steps: list[int]) -> None:
    stream = b"".join(pieces)
    tap, at = RoutedExpertsParser(1 << 20), 0
    for step in cycle(steps):
        tap.feed(stream[at : at + step])
        at += step
        if at >= len(stream):
            break
    expected = [event.strip() for event in stream.split(b"\n\n") if MARK in event]
    kept = [event.strip() for events in tap.found() for event in events.split(b"\n\n") if MARK in event]
    assert kept == expected[-len(kept) :] if kept else not expected
    assert not tap.too_long


def test_a_tap_lets_go_of_what_is_too_long() -> None:
    tap = RoutedExpertsParser(100)
    for _ in range(10):
        tap.feed(b'"routed_experts": ' + b"x" * 50)
    assert tap.too_long
    assert sum(map(len, tap.found())) <= 200


# Through a router


class NamingServer:
    """A foreign server that names the experts it chose."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = WAYS["vllm"]
        self.sent: list[bytes] = []

    async def chat(self, http: web.Request) -> web.StreamResponse:
        usage = {
            "prompt_tokens": PROMPT,
            "completion_tokens": COMPLETION,
            "total_tokens": PROMPT + COMPLETION,
        }
        body = json.dumps({"id": "theirs", "usage": usage, **self.content}, indent=1).encode()
        if not json.loads(await http.read()).get("stream"):
            self.sent.append(body)
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        flat = json.dumps(json.loads(body)).encode()
        self.sent.append(
            b'data: {"choices": [{"delta": {"content": "w"}}]}\n\ndata: ' + flat + b"\n\ndata: [DONE]\n\n"
        )
        for at in range(0, len(self.sent[-1]), 37):
            await response.write(self.sent[-1][at : at + 37])
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[NamingServer, str]]:
    foreign, app = NamingServer(), web.Application()
    app.router.add_post(CHAT, foreign.chat)
    async with served_web(app) as url:
        yield foreign, url


async def joined(house: House, url: str, shape: ModelShape | None = SHAPE) -> None:
    nothing = Capabilities(kv_events=False, load=False, experts=False, token_ids=False)
    about = engine_joined(
        "foreign", [url], None, shape=shape, placement=None, layout=None, capabilities=nothing
    )
    await house.bus.record(house.subjects.membership("foreign"), about)
    await house.beat(about)
    await until(lambda: house.service.ready)


@contextlib.asynccontextmanager
async def collected(house: House) -> AsyncIterator[list[Any]]:
    """Collect what is published about requests and imports."""
    published: list[Any] = []
    subjects = house.subjects
    async with MemoryBus(house.broker).subscribe(
        subjects.imports, subjects.requests_read, subjects.requests_finished
    ) as subscription:

        async def listen() -> None:
            async for received in subscription:
                published.append(received.message)  # noqa: PERF401 - the reader looks while it grows

        task = asyncio.create_task(listen())
        yield published
        task.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tracker_gets_the_experts_and_the_answer_passes_byte_for_byte(
    house: House, server: tuple[NamingServer, str], stream: bool
) -> None:
    foreign, url = server
    await joined(house, url)
    async with collected(house) as published:
        answer = await house.post(CHAT, chat(stream=stream))
        assert answer.body == foreign.sent[0]
        await until(lambda: len(published) == 3)
    decision = answer.headers["x-roost-decision-id"]
    (counts,) = [one for one in published if isinstance(one, CountsImported)]
    (profiled,) = [one for one in published if isinstance(one, RequestsProfiled)]
    (finished,) = [one for one in published if isinstance(one, RequestsFinished)]
    np.testing.assert_array_equal(counts.counts.array(), by_hand(CHOSEN))
    assert (counts.model, counts.tokens) == ("demo", len(CHOSEN))
    assert decision in counts.digest
    (request,) = profiled.requests
    assert (profiled.engine, profiled.rank, profiled.clusters, request.decision, request.tokens) == (
        "foreign",
        0,
        0,
        decision,
        len(CHOSEN),
    )
    assert request.sample is not None
    np.testing.assert_array_equal(request.sample.prompt.array(), by_hand(CHOSEN[:PROMPT]))
    assert [one.decision for one in finished.requests] == [decision]


async def test_where_clusters_are_known_the_signature_is_over_them(
    house: House, server: tuple[NamingServer, str]
) -> None:
    _, url = server
    await joined(house, url)
    counts = by_hand(CHOSEN)
    alike, other = (counts + 0.1) / (counts + 0.1).sum(axis=1, keepdims=True), np.full((3, 8), 0.125)
    clusters = ClusterModel(
        5, np.stack([other, alike]).astype(np.float32), np.array([0.5, 0.5], np.float32), 1.0
    )
    await house.bus.publisher(house.subjects.clusters).publish(
        ClustersPublished(model="demo", record=clusters.record())
    )
    await until(lambda: house.service.view.clusters("demo") is not None)
    async with collected(house) as published:
        await house.post(CHAT, chat())
        await until(lambda: any(isinstance(one, RequestsProfiled) for one in published))
    (profiled,) = [one for one in published if isinstance(one, RequestsProfiled)]
    assert profiled.clusters == 5
    assert np.argmax(unpack(profiled.requests[0].signature, clusters.shares)) == 1


async def test_a_tracker_learns_from_a_foreign_engine(house: House, server: tuple[NamingServer, str]) -> None:
    _, url = server
    await joined(house, url)
    tracker = TrackerService(
        MemoryBus(house.broker), house.subjects, TrackerConfig(publish_seconds=0.1, prior_pairs=1e-3)
    )
    running = asyncio.create_task(tracker.run())
    await asyncio.wait_for(tracker.ready.wait(), 5)
    try:
        await house.post(CHAT, chat())
        await until(lambda: b"roost_tracker_imports_total 1.0" in tracker.metrics.exposition())
        known = await house.bus.request(house.subjects.describe_profile, DescribePopularity(model="demo"))
        assert isinstance(known, PopularityDescribed)
        assert known.tokens == pytest.approx(len(CHOSEN), rel=0.01)
        counts = by_hand(CHOSEN)
        np.testing.assert_allclose(known.slow.array(), counts / counts.sum(axis=1, keepdims=True), atol=1e-3)
        await until(lambda: house.service.view.clusters("demo") is not None)
        await house.post(CHAT, chat())
        await until(lambda: b"roost_tracker_imports_total 2.0" in tracker.metrics.exposition())
        assert b"roost_tracker_rejected_total{" not in tracker.metrics.exposition()
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=5)


async def test_whole_profiles_are_rationed(house: House, server: tuple[NamingServer, str]) -> None:
    _, url = server
    await joined(house, url)
    async with collected(house) as published:
        for _ in range(12):
            await house.post(CHAT, chat())
        await until(lambda: sum(isinstance(one, RequestsProfiled) for one in published) == 12)
    whole = [one.requests[0].sample is not None for one in published if isinstance(one, RequestsProfiled)]
    assert whole[0]
    assert sum(whole) < 12


async def test_a_bad_array_is_counted_and_the_answer_passes_all_the_same(
    house: House, server: tuple[NamingServer, str]
) -> None:
    foreign, url = server
    foreign.content = {"choices": [{"routed_experts": npy(CHOSEN + 100)}]}
    await joined(house, url)
    async with collected(house) as published:
        for number in range(2):
            assert (await house.post(CHAT, chat())).body == foreign.sent[number]
        await until(
            lambda: b'foreign_routings_total{outcome="bad"} 2.0' in house.service.metrics.exposition()
        )
        assert not [one for one in published if isinstance(one, CountsImported | RequestsProfiled)]


async def test_without_a_shape_no_parser_runs(house: House, server: tuple[NamingServer, str]) -> None:
    foreign, url = server
    await joined(house, url, None)
    async with collected(house) as published:
        assert (await house.post(CHAT, chat(stream=True))).body == foreign.sent[0]
        await asyncio.sleep(0.05)
        assert not published
