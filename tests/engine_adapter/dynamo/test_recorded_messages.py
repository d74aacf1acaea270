"""Messages of a real Dynamo, recorded by `make record-dynamo`: requests of its frontend are answered as they
were then, and what its runtime published for us is what our own hashes and codec say."""

import asyncio
import base64
import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bus.protocol.codec import Undeliverable, decode, unseal
from engine_adapter.dynamo.requests import (
    UnservableRequest,
    generation_request,
    parse,
    served_rank,
    token_stops,
)
from engine_adapter.dynamo.worker import DynamoWorker
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from tests.engine_adapter.dynamo.request_builders import FakeContext

PLANES = ("nats", "zmq")
_FILE = Path(__file__).parent / "dynamo-1.6.1.json"
_HEAD = 5
"""bytes before the envelope in the last frame of a ZMQ message: its version and its length"""


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def envelopes(plane: str) -> Iterator[tuple[str, bytes]]:
    """Topic and envelope of each message."""
    for message in recorded()[plane]["messages"]:
        if plane == "nats":
            yield message["subject"].rpartition(".")[2], base64.b64decode(message["data"])
        else:
            topic, _, _, content = map(base64.b64decode, message)
            yield topic.decode(), content[_HEAD:]


def messages(plane: str) -> list[Any]:
    """Return the decoded content of each message: what a reader on the bus of Roost would get."""
    return [decode(unseal(raw).topic, unseal(raw).payload) for _, raw in envelopes(plane)]


def kv_events(plane: str) -> list[RoutedKvEvent]:
    return [event for message in messages(plane) if isinstance(message, tuple) for event in message]


def served(plane: str) -> list[dict[str, Any]]:
    return [one for one in recorded()[plane]["requests"].values() if one["refused"] is None]


@pytest.mark.looptime
@pytest.mark.parametrize("plane", PLANES)
async def test_recorded_requests_are_answered_as_they_were(plane: str) -> None:
    engine = SimulatedEngine(SimulatedConfig(ranks=2, output_tokens=30))
    runs = [asyncio.create_task(rank.run(), name="a rank under test") for rank in engine.ranks]
    worker = DynamoWorker(dict(enumerate(engine.ranks)), {})
    for name, one in recorded()[plane]["requests"].items():
        found: list[dict[str, Any]] = []
        refused = None
        try:
            found += [chunk async for chunk in worker.generate(one["request"], FakeContext())]
        except UnservableRequest as error:
            refused = str(error)
        assert refused == one["refused"], name
        if not one["request"]["stop_conditions"][
            "stop"
        ]:  # there the frontend cancelled once it saw the string
            assert _tokens(found) == _tokens(one["chunks"]), name
            assert found[-1:] == [] or found[-1]["finish_reason"] == one["chunks"][-1]["finish_reason"], name
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)


def _tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


@pytest.mark.parametrize("plane", PLANES)
def test_the_blocks_that_dynamo_published_have_the_hashes_that_we_make(plane: str) -> None:
    published: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for event in kv_events(plane):
        assert not isinstance(event.event.data, str)
        assert event.event.data.stored is not None
        for block in event.event.data.stored.blocks:
            published[event.event.dp_rank][block.block_hash] = block.tokens_hash
    expected: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for one in served(plane):
        routing = one["request"]["routing"]
        known = one["request"]["token_ids"] + _tokens(one["chunks"])[:-1]  # the last token is never computed
        local = local_hashes(known, seed=salted_seed(routing.get("cache_salt", "")))
        expected[routing["dp_rank"]] |= dict(zip(sequence_hashes(local), local, strict=True))
    assert published[0]
    assert published == expected


@pytest.mark.parametrize("plane", PLANES)
def test_each_publisher_numbers_its_messages_and_names_the_instance(plane: str) -> None:
    (card,) = (one for key, one in recorded()[plane]["discovery"].items() if key.startswith("mdc/"))
    last: dict[int, int] = {}
    for topic, raw in envelopes(plane):
        envelope = unseal(raw)
        assert envelope.topic == topic
        assert envelope.sequence == last.get(envelope.publisher_id, -1) + 1
        last[envelope.publisher_id] = envelope.sequence
    assert {event.worker_id for event in kv_events(plane)} == {card["instance_id"]}
    loads = [message for message in messages(plane) if isinstance(message, KvMetrics)]
    assert {load.worker_id for load in loads} == {card["instance_id"]}
    assert any(load.kv_used_blocks for load in loads)


@pytest.mark.parametrize("plane", PLANES)
def test_the_card_says_what_the_worker_can_take(plane: str) -> None:
    (card,) = (one for key, one in recorded()[plane]["discovery"].items() if key.startswith("mdc/"))
    config = card["card_json"]["runtime_config"]
    engine = SimulatedEngine(SimulatedConfig(ranks=2, output_tokens=30))
    about = engine.ranks[0].description
    assert (config["total_kv_blocks"], config["context_length"]) == (about.kv_blocks, about.max_context)
    assert (config["data_parallel_start_rank"], config["data_parallel_size"]) == (0, 2)
    assert config["runtime_data"] == {"roost": {"engine": "sim", "worker_id": "0000000000000007"}}
    assert card["card_json"]["kv_cache_block_size"] == about.block_size


def test_a_thousand_mutated_messages_are_decoded_or_refused() -> None:
    """Bits turned, bytes cut out, doubled or put in: of 1,000 messages each one is read or refused by a
    reader."""
    draw = random.Random(6)
    originals = [raw for plane in PLANES for _, raw in envelopes(plane)]
    refused = 0
    for _ in range(1000):
        mutated = _mutated(bytearray(draw.choice(originals)), draw)
        try:
            envelope = unseal(mutated)
            decode(envelope.topic, envelope.payload)
        except Undeliverable:
            refused += 1
    assert 300 < refused < 1000


def _mutated(raw: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(raw)), draw.randrange(4)
        if kind == 0:
            raw[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del raw[at : at + draw.randint(1, 9)]
        elif kind == 2:
            raw[at:at] = raw[at : at + draw.randint(1, 9)]
        else:
            raw[at:at] = draw.randbytes(draw.randint(1, 5))
        if not raw:
            return b""
    return bytes(raw)


def test_a_thousand_mutated_requests_are_read_or_refused() -> None:
    """Values replaced, removed and moved: a worker serves each of 1,000 requests or refuses it."""
    draw = random.Random(7)
    originals = [one["request"] for plane in PLANES for one in recorded()[plane]["requests"].values()]
    odd = [
        None,
        True,
        -1,
        2**64,
        0.5,
        float("nan"),
        "",
        "text",
        b"\xff",
        [],
        [[]],
        {},
        {"a": 1},
        [1, "2"],
        10**30,
    ]
    refused = 0
    for _ in range(1000):
        mutated = copy.deepcopy(draw.choice(originals))
        for _ in range(draw.randint(1, 3)):
            place = draw.choice(
                [mutated, *(part for part in mutated.values() if isinstance(part, dict) and part)]
            )
            key = draw.choice(list(place))
            if draw.random() < 0.3 and len(place) > 1:
                del place[key]
            else:
                place[key] = draw.choice([*odd, *place.values()])
        try:
            parsed = parse(mutated)
            served_rank(parsed, (0, 1))
            token_stops(parsed)
            generation_request(parsed, vocabulary=1000, max_context=4096, seed=1).check_bounds(
                max_context=4096, vocabulary=1000
            )
        except UnservableRequest:
            refused += 1
    assert 100 < refused < 1000
