"""A thousand messages of SGLang's formats and mutations of them: each is read, or counted and left out; none
is fatal, and what comes after them is read as if they had never come."""

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from deploy.process import alongside
from engine_adapter.batching.detokenizer import TextStream
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.kv_blocks import KvBlocks
from engine_adapter.foreign.kv_frames import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    UnreadableEvents,
    events_of,
)
from engine_adapter.foreign.kv_source import KvSource
from engine_adapter.foreign.kv_stream import KvStream
from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.sglang.discovery import discover
from engine_adapter.sglang.generate import AnswerReader, UnreadableAnswer, event_of, routed_table
from engine_adapter.sglang.load import rank_load
from engine_adapter.sglang.model_shape import model_of
from engine_adapter.sglang.server import SglangServer
from tests.engine_adapter.foreign.test_kv_blocks import Mirror
from tests.engine_adapter.sglang.fake_server import (
    CONFIG,
    FOLDER,
    PAGE,
    PageCache,
    batch,
    fake_sglang,
    routed,
)
from tests.engine_adapter.sglang.record import RECORDED

MESSAGES = 1000
OF_SGLANG: Any = json.loads(RECORDED.read_text(encoding="utf-8"))
KINDS = {"BlockStored": BlocksStored, "BlockRemoved": BlocksRemoved, "AllBlocksCleared": BlocksCleared}
STRANGE: Sequence[Any] = (
    None,
    True,
    -1,
    0,
    1 << 63,
    -(1 << 63),
    1e308,
    float("-inf"),
    "",
    "x" * 300,
    b"",
    b"\xff" * 40,
    [],
    [[]],
    [None],
    {},
    {"type": "BlockStored"},
    {"type": None},
)


class Mutations:
    """Changes of messages, the same in each run."""

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def pick(self, among: Sequence[Any]) -> Any:
        return among[int(self._dice.integers(len(among)))]

    def of_bytes(self, content: bytes) -> bytes:
        """Flip, cut, double or insert bytes."""
        found = bytearray(content)
        for _ in range(int(self._dice.integers(1, 4))):
            at = int(self._dice.integers(len(found) + 1))
            match int(self._dice.integers(4)):
                case 0 if at < len(found):
                    found[at] ^= 1 << int(self._dice.integers(8))
                case 1:
                    del found[at:]
                case 2:
                    found[at:at] = found[at : at + 9]
                case _:
                    found[at:at] = self._dice.bytes(3)
        return bytes(found)

    def of_value(self, value: Any) -> Any:
        """Replace, drop or double one value somewhere inside."""
        if isinstance(value, dict) and value and self._dice.random() < 0.85:
            key = self.pick(list(value))
            if self._dice.random() < 0.1:
                return {name: one for name, one in value.items() if name != key}
            return {**value, key: self.of_value(value[key])}
        if isinstance(value, list) and value and self._dice.random() < 0.85:
            at = int(self._dice.integers(len(value)))
            doubled = [value[at]] if self._dice.random() < 0.1 else []
            return [*value[:at], self.of_value(value[at]), *doubled, *value[at + 1 :]]
        return self.pick(STRANGE)


def kv_batches() -> Iterator[bytes]:
    """Batches of a cache that stores, evicts and is cleared, in the array form of older versions too."""
    cache, dice = PageCache(20), np.random.default_rng(3)
    while True:
        ids = [int(dice.integers(3)), *dice.integers(1, 250, int(dice.integers(20, 120))).tolist()]
        cache.insert(ids, None if dice.random() < 0.5 else "salt")
        if dice.random() < 0.05:
            cache.clear()
        events = cache.take()
        if events:
            yield batch(events, 0)
            fields = (
                "type",
                "block_hashes",
                "parent_block_hash",
                "token_ids",
                "block_size",
                "lora_id",
                "medium",
            )
            yield msgspec.msgpack.encode([1.0, [[one.get(name) for name in fields] for one in events]])


def mutated_batches(seed: int) -> list[bytes]:
    change, good = Mutations(seed), kv_batches()
    found = []
    for number in range(MESSAGES):
        payload = next(good)
        match number % 4:
            case 0:
                found.append(payload)
            case 1:
                found.append(change.of_bytes(payload))
            case _:
                value = change.of_value(msgspec.msgpack.decode(payload))
                found.append(msgspec.msgpack.encode(value))
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_kv_events_are_read_or_refused(seed: int) -> None:
    blocks, read, refused = KvBlocks(PAGE, 20), 0, 0
    for payload in mutated_batches(seed):
        try:
            for event in events_of(payload):
                blocks.apply(event)
            read += 1
        except (UnreadableEvents, OverflowError):
            refused += 1
            blocks.clear()
    assert read + refused == MESSAGES
    assert read > MESSAGES / 4 < refused


def test_batches_of_sglangs_own_classes_are_read_field_by_field() -> None:
    """`record.py` took the classes from the released source, and names it."""
    for recorded in OF_SGLANG["batches"]:
        read = events_of(base64.b64decode(recorded["frame"]))
        assert len(read) == len(recorded["events"])
        for event, told in zip(read, recorded["events"], strict=True):
            assert type(event) is KINDS[told["type"]]
            fields = msgspec.json.decode(msgspec.json.encode(event))
            unread = {name: fields.get(name, "not read") for name in told if fields.get(name) != told[name]}
            assert set(unread) <= {"type", "session_id"}


def test_a_thousand_mutations_of_them_are_read_or_refused() -> None:
    change, read, refused = Mutations(4), 0, 0
    frames = [base64.b64decode(one["frame"]) for one in OF_SGLANG["batches"]]
    for number in range(MESSAGES):
        try:
            events_of(change.of_bytes(frames[number % len(frames)]))
            read += 1
        except UnreadableEvents:
            refused += 1
    assert read + refused == MESSAGES
    assert read
    assert refused


async def test_a_stream_counts_what_it_cannot_read_and_follows_on() -> None:
    context, mirror = zmq.asyncio.Context(), Mirror()
    publisher: Any = context.socket(zmq.PUB)
    publisher.set_hwm(0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    stream = KvStream("rank 0", KvSource(f"tcp://127.0.0.1:{port}"), KvBlocks(PAGE), mirror.apply)
    cache = PageCache()
    cache.insert(list(range(1, 40)), None)
    last = batch([{"type": "AllBlocksCleared"}, *cache.take()], 0)
    try:
        async with asyncio.timeout(30), alongside(stream.run(), "stream"):
            while not stream.connected:  # noqa: ASYNC110 no event
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)  # the subscription follows the connection
            for number, payload in enumerate([*mutated_batches(7), last]):
                await publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
            while len(mirror.blocks) != 2:  # noqa: ASYNC110 no event
                await asyncio.sleep(0.005)
    finally:
        context.destroy(linger=0)
    assert MESSAGES / 4 < stream.unreadable < 3 * MESSAGES / 4
    assert stream.lost_batches == 0


# Answers

TOKENIZER = CheckpointTokenizer(FOLDER)
MODEL = model_of(CONFIG)
PROMPT = list(b"a prompt")


def answer_event(ids: list[int], *, last: bool) -> dict[str, Any]:
    table = base64.b64encode(routed([*PROMPT, *ids]).tobytes()).decode()
    return {
        "text": None,
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": len(ids)} if last else None,
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(ids),
            "cached_tokens": 4,
            "num_retractions": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "output_top_logprobs": [[[-0.5, token, None]] for token in ids],
            **({"routed_experts": table} if last else {}),
        },
    }


@pytest.mark.parametrize("incremental", [True, False])
def test_events_of_answers_are_read_or_refused(incremental: bool) -> None:
    assert MODEL is not None
    change, read, refused = Mutations(11), 0, 0
    request = GenerationRequest(prompt=PROMPT, max_tokens=64, sampling=Sampling(temperature=0.0, logprobs=1))
    for number in range(MESSAGES):
        reader = AnswerReader(
            request, TextStream(TOKENIZER.detokenizer(), ("zz",)), TOKENIZER.eos, incremental=incremental
        )
        data = msgspec.json.encode(
            answer_event(list(b"some answer")[: number % 11 + 1], last=number % 3 == 0)
        )
        if number % 4 == 1:
            data = change.of_bytes(data)
        elif number % 4:
            data = msgspec.json.encode(_without_infinity(change.of_value(msgspec.json.decode(data))))
        try:
            event = event_of(data)
            tokens, _, scored = reader.take(event)
            assert len(tokens) == len(scored) == len(reader.ids) <= 64
            encoded = event.meta_info.routed_experts
            if encoded is not None:
                table = routed_table(encoded, MODEL, positions=80, cached=event.meta_info.cached_tokens)
                assert table.min(initial=-1) >= -1
            read += 1
        except UnreadableAnswer:
            refused += 1
    assert read + refused == MESSAGES
    assert read > MESSAGES / 4
    assert refused > MESSAGES / 8


def _without_infinity(value: Any) -> Any:
    """JSON has no infinite numbers, nor bytes."""
    if isinstance(value, dict):
        return {name: _without_infinity(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_infinity(one) for one in value]
    return None if value == float("-inf") or isinstance(value, bytes) else value


async def test_what_the_server_says_of_itself_is_read_or_refused() -> None:
    """Mutations of its properties, models and loads: the agent finds a server, or says why there is none."""
    change, read, refused = Mutations(13), 0, 0
    async with fake_sglang(kv=True) as server:
        config = SglangConfig(url=server.url)
        client = SglangServer(config.base, None, 5)
        good = dict(server.info)
        for _ in range(150):
            server.info = _without_infinity(change.of_value({**good}))
            try:
                found = await discover(config, client)
                assert found.block_size >= 16
                for one in await client.loads():
                    rank_load(
                        one, None, block_size=found.block_size, kv_blocks=found.kv_blocks, cached_blocks=0
                    )
                read += 1
            except EngineFailed:
                refused += 1
    assert read + refused == 150
    assert min(read, refused) > 10
