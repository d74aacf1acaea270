"""Engines that take the client's own body and return ids: exact prefixes, ranks behind one URL, continuation."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.facts.engines import ServedModel
from fleet.timing import EngineSpeed
from tests.router.router_fixture import TEMPLATE, House, OpenHouse, archive, bpe, metric, until
from tests.router.vllm_engine import BLOCK, CAPABILITIES, RANK_HEADER, VllmEngine
from tests.router.vllm_like import TOKENIZER, summary, unbroken
from tests.web_server import served_web

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "The quick brown fox jumps over the lazy dog, and then it tells everybody about it. " * 4
DEAD_AFTER = 600.0
PACKED = archive(bpe(257), {"eos_token": "<eos>", "chat_template": TEMPLATE})
Open = Callable[..., Awaitable[House]]


@pytest.fixture
async def before(open_house: OpenHouse) -> AsyncIterator[Open]:
    """Start a router before these engines; `settings` and `about` as in `open_house` and `VllmEngine.join`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*engines: VllmEngine, about: dict[str, Any] | None = None, **settings: Any) -> House:
            house = await open_house(dead_after_seconds=DEAD_AFTER, **settings)  # they beat only once
            for engine in engines:
                engine.held.set()
                await stack.enter_async_context(engine.snapshots(house))
                url = await stack.enter_async_context(served_web(engine.app()))
                await engine.join(house, url, PACKED, **(about or {}))
            return house

        yield start


def talk(*said: str, **more: Any) -> dict[str, Any]:
    """A chat in which the client and the assistant speak in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 20, **more}


def ids_of(*said: str) -> list[int]:
    roles = ("user", "assistant")
    rendered = "".join(f"{roles[at % 2]}: {text}\n" for at, text in enumerate(said)) + "assistant: "
    return TOKENIZER.encode_rendered(rendered)


async def computed(house: House, engine: VllmEngine) -> None:
    """Wait until the router's index has all blocks of the engine."""
    assert engine.joined is not None
    worker, index = engine.joined.worker_id, house.service.scheduler.kv.block_index
    await until(
        lambda: all(
            index.held((worker, rank)) == len(cache.blocks) for rank, cache in enumerate(engine.caches)
        )
    )


async def test_the_clients_own_body_reaches_the_rank_that_the_header_names(before: Open) -> None:
    engine = VllmEngine("vllm")
    house = await before(engine)
    sent = talk(
        "hello",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        structured_outputs={"regex": "[a-z]+"},
        top_k=5,
        priority=0,
        wibble={"a": [1]},
    )
    answer = await house.post(CHAT, sent)
    assert answer.status == 200
    [taken] = engine.taken
    assert taken.path == CHAT
    assert taken.fields == {**sent, "return_token_ids": True}
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    assert record["chosen"] == f"vllm/{taken.rank}"
    assert record["headers"] == {RANK_HEADER.lower(): str(taken.rank)}
    assert (record["dialect"], record["hashed"]) == ("text", "ids")
    assert record["prompt_tokens"] == len(ids_of("hello"))
    assert [one["overlap_approximate"] for one in record["candidates"]] == [False, False]


async def test_a_rank_that_the_client_names_itself_is_replaced(before: Open) -> None:
    engine = VllmEngine("vllm")
    house = await before(engine)
    chosen = []
    for number in range(6):
        answer = await house.post(CHAT, talk(f"{number}"), headers={RANK_HEADER: "7"})
        assert answer.status == 200
        decision = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
        chosen.append(decision["chosen"])
    assert [f"vllm/{taken.rank}" for taken in engine.taken] == chosen
    assert set(chosen) <= {"vllm/0", "vllm/1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_ids_that_the_client_did_not_request_are_null_and_all_else_is_as_the_server_wrote_it(
    before: Open, path: str, stream: bool
) -> None:
    engine = VllmEngine("vllm", ranks=1)
    house = await before(engine)
    body = (
        talk("hello", stream=stream)
        if path == CHAT
        else {"model": "demo", "prompt": "hello", "stream": stream}
    )
    asked = await house.post(path, {**body, "return_token_ids": True})
    plain = await house.post(path, body)
    assert engine.taken[1].fields == {**body, "return_token_ids": True}
    assert b'token_ids":[' in asked.body
    assert b'token_ids":[' not in plain.body
    assert b'prompt_token_ids":null' in plain.body
    assert _without(asked.body) == _without(plain.body)


def _without(body: bytes) -> Any:
    """An answer without any ids."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(one) for name, one in value.items() if not name.endswith("token_ids")}
        return [clean(one) for one in value] if isinstance(value, list) else value

    if body.startswith(b"{"):
        return clean(json.loads(body))
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-1]]
    return [event if event == b"[DONE]" else clean(json.loads(event)) for event in events]


async def test_conversations_return_to_the_rank_that_holds_their_blocks(before: Open) -> None:
    """24 conversations of three turns, every turn sent without anything that names the conversation."""
    engine = VllmEngine("vllm")
    house = await before(engine)
    missed = 0
    for number in range(24):
        said = [f"{number} {LONG}"]
        for turn in range(3):
            answer = await house.post(CHAT, talk(*said, stream=bool(number % 2)))
            await computed(house, engine)
            taken = engine.taken[-1]
            full = (len(ids_of(*said[:-2])) - len("assistant: ")) // BLOCK if turn else 0
            missed += taken.cached_blocks < full
            record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
            chosen = next(one for one in record["candidates"] if f"vllm/{one['rank']}" == record["chosen"])
            assert chosen["overlap_blocks"] == taken.cached_blocks
            said += ["so it is", f"and turn {turn}?"]
    assert missed == 0
    assert {taken.rank for taken in engine.taken} == {0, 1}


async def test_blocks_of_a_tenants_salt_and_of_an_adapter_are_found_under_their_own_hashes(
    before: Open,
) -> None:
    engine = VllmEngine("vllm")
    models = (
        ServedModel(name="demo", max_context=4096),
        ServedModel(name="fine", max_context=4096, adapter=True),
    )
    capabilities = {name: getattr(CAPABILITIES, name) for name in CAPABILITIES.__struct_fields__} | {
        "isolates_tenants": True
    }
    house = await before(engine, about={"models": models, "capabilities": type(CAPABILITIES)(**capabilities)})
    assert engine.joined is not None
    await engine.caches[1].compute(ids_of(LONG), "mine")
    adapted = sequence_hashes(local_hashes(ids_of(LONG), BLOCK, salted_seed("", "fine")))
    house.service.scheduler.kv.block_index.store((engine.joined.worker_id, 0), None, adapted)
    await until(lambda: house.service.scheduler.kv.block_index.held((engine.joined.worker_id, 1)))

    async def overlap(**more: Any) -> dict[str, int]:
        record = (await house.post("/v1/route", {**talk(LONG), **more})).json
        return {f"{one['engine']}/{one['rank']}": one["overlap_blocks"] for one in record["candidates"]}

    whole = len(ids_of(LONG)) // BLOCK
    assert await overlap() == {"vllm/0": 0, "vllm/1": 0}
    assert await overlap(cache_salt="mine") == {"vllm/0": 0, "vllm/1": whole}
    assert await overlap(model="fine") == {"vllm/0": whole, "vllm/1": 0}
    answer = await house.post(CHAT, talk(LONG, cache_salt="mine"))
    assert answer.status == 200
    assert (engine.taken[-1].rank, engine.taken[-1].fields["cache_salt"]) == (1, "mine")


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 2)])
async def test_streams_of_a_server_that_dies_are_continued_equal_to_unbroken_ones(
    before: Open, sizes: tuple[int, ...]
) -> None:
    prompts: list[list[int]] = []
    engines = VllmEngine("one", sizes=sizes, prompts=prompts), VllmEngine("two", sizes=sizes, prompts=prompts)
    house = await before(*engines, policy="round_robin", breaker_failures=100)
    for number in range(12):
        engines[0].die_after, engines[0].dead = 5 + number, False
        answer = await house.post(CHAT, talk(f"stream {number}", stream=True, max_tokens=40))
        assert answer.status == 200
        found = summary(answer.body)
        assert found["error"] is None
        expected = TOKENIZER.decode(unbroken(ids_of(f"stream {number}"), 40)).rstrip("\ufffd")
        assert (found["text"], found["finish"], found["ids"], found["done"]) == (expected, "length", [], True)
        assert engines[0].joined is not None
        house.service.view.sign_of_life(engines[0].joined.worker_id, house.service.clock())
    rests = [taken for taken in engines[1].taken if taken.path == TEXT]
    assert len(rests) >= 3
    for rest in rests:
        assert TOKENIZER.decode(rest.fields["prompt"]).startswith("user: stream ")
        assert rest.headers[RANK_HEADER.lower()] == str(rest.rank)
        assert rest.headers["x-request-id"] == rest.headers["x-roost-decision-id"]
        assert rest.headers["x-request-id"].endswith("-a2")


async def test_a_whole_answer_of_a_server_that_dies_is_asked_for_elsewhere(before: Open) -> None:
    dying, other = VllmEngine("one", dead=True), VllmEngine("two")
    house = await before(dying, other, policy="round_robin")
    answers = [await house.post(CHAT, talk(f"{number}")) for number in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert all(b'"token_ids":null' in answer.body for answer in answers)
    names = [taken.headers["x-request-id"] for taken in other.taken]
    assert any(name.endswith("-a2") for name in names)
    assert [answer.headers["x-roost-decision-id"] for answer in answers] == names


async def test_a_whole_answer_is_awaited_though_the_agent_beside_its_server_is_dead(
    before: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats come from the agent: when it is killed, vLLM computes on."""
    monkeypatch.setattr("router.passthrough.unstreamed.LOOK_SECONDS", 0.01)
    engine, other = VllmEngine("one"), VllmEngine("two")
    house = await before(engine, other)
    engine.held.clear()
    other.held.clear()
    answer = asyncio.create_task(house.post(CHAT, talk("x")), name="asks")
    await until(lambda: engine.taken or other.taken)
    house.service.view.sweep(house.service.clock() + DEAD_AFTER + 1, DEAD_AFTER, 9e9)
    assert not house.service.view.models(live=True)
    await asyncio.sleep(0.1)  # it looks several times
    engine.held.set()
    other.held.set()
    assert (await answer).status == 200
    assert len(engine.taken) + len(other.taken) == 1


async def test_an_answer_is_not_continued_by_other_weights_and_says_why(before: Open) -> None:
    dying, other = VllmEngine("one", die_after=6), VllmEngine("two")
    house = await before(dying)
    async with other.snapshots(house), served_web(other.app()) as url:
        answer = asyncio.create_task(house.post(CHAT, talk("x", stream=True)), name="asks")
        await until(lambda: dying.taken)
        await other.join(house, url, PACKED, weights_digest="other weights")
        found = summary((await answer).body)
    assert "weights" in found["error"]["message"]
    assert other.taken == []


async def test_each_attempt_is_named_by_its_decision_and_the_client_hears_its_own_id(before: Open) -> None:
    engine = VllmEngine("vllm")
    house = await before(engine)
    answers = [await house.post(CHAT, talk("x"), headers={"x-request-id": "mine"}) for _ in range(2)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    sent = [taken.headers["x-request-id"] for taken in engine.taken]
    assert sent == [answer.headers["x-roost-decision-id"] for answer in answers]
    assert len(set(sent)) == 2


def promised(house: House) -> tuple[int, int]:
    """Outstanding prefill tokens and requests, as the next decision would see them."""
    table = house.service.view.target_table("demo")
    load = house.service.scheduler.reservations.load(table.rows, house.service.clock())
    return int(load[0].sum()), int(load[1].sum())


@pytest.mark.parametrize("told", [True, False])
async def test_an_unstreamed_prompt_counts_as_computed_when_the_rank_holds_its_blocks_or_is_long_overdue(
    before: Open, told: bool
) -> None:
    """A minute is expected where events tell, and 40 ms where they are lost."""
    engine, tokens = VllmEngine("vllm", ranks=1), len(ids_of(LONG))
    seconds = 60.0 if told else 0.04
    house = await before(engine, about={"speed": EngineSpeed(prefill_token=seconds / tokens)})
    engine.held.clear()
    compute, may = engine.caches[0].compute, asyncio.Event()

    async def later(ids: Any, salt: str) -> None:
        await may.wait()
        await compute(ids, salt)

    engine.caches[0].compute = later  # type: ignore[method-assign]
    begun = asyncio.get_running_loop().time()
    answer = asyncio.create_task(house.post(CHAT, talk(LONG)), name="asks")
    await until(lambda: engine.taken)
    if told:
        assert promised(house) == (tokens, 1)
        may.set()
    await until(lambda: promised(house) == (0, 1))
    assert told or asyncio.get_running_loop().time() - begun >= 4 * seconds
    may.set()
    engine.held.set()
    assert (await answer).status == 200
    assert promised(house) == (0, 0)


async def test_ids_of_the_server_win_and_the_difference_is_counted_and_said_once(
    before: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = VllmEngine("vllm", template_adds="You are kind. ")
    house = await before(engine)
    with caplog.at_level(logging.WARNING, "router.service"):
        for stream in (True, False, True):
            assert (await house.post(CHAT, talk("hello", stream=stream))).status == 200
    assert metric(house.service.metrics, "prompts_differ_total", model="demo") == 3
    assert len([one for one in caplog.records if "other token ids" in one.getMessage()]) == 1


async def test_without_kv_events_the_servers_ids_are_indexed_after_it_answered(before: Open) -> None:
    blind = type(CAPABILITIES)(kv_events=False, load=True, experts=False, token_ids=False, returns_ids=True)
    engine = VllmEngine("vllm", template_adds="You are kind. ")
    house = await before(engine, about={"capabilities": blind})
    await house.post(CHAT, talk(LONG))
    taken = engine.taken[-1]
    explained = (await house.post("/v1/route", {"model": "demo", "prompt": taken.prompt})).json
    found = {one["rank"]: one["overlap_blocks"] for one in explained["candidates"]}
    assert found == {taken.rank: len(taken.prompt) // BLOCK, 1 - taken.rank: 0}


async def test_a_request_that_cannot_be_tokenised_here_is_served_all_the_same(before: Open) -> None:
    engine = VllmEngine("vllm")
    house = await before(engine)
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    body = {"model": "demo", "messages": [{"role": "user", "content": picture}], "max_tokens": 5}
    answer = await house.post(CHAT, body)
    assert answer.status == 200
    assert engine.taken[-1].fields == body
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    assert record["hashed"] == "text"
    assert (await house.post("/v1/embeddings", {"model": "demo", "input": "x"})).status == 200
    assert engine.taken[-1].rank in (0, 1)


async def test_an_error_of_the_server_about_the_request_passes_as_it_came(before: Open) -> None:
    error = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    engine = VllmEngine("vllm", refuses=(400, error))
    house = await before(engine)
    answer = await house.post(CHAT, talk("x"))
    assert (answer.status, answer.json) == (400, error)
    assert len(engine.taken) == 1


async def test_the_stream_of_a_large_body_is_continued_too(before: Open) -> None:
    prompts: list[list[int]] = []
    engines = [VllmEngine(name, prompts=prompts) for name in ("one", "two")]
    house = await before(*engines, large_body_bytes=500)
    engines[0].die_after = engines[1].die_after = 9
    dying = asyncio.create_task(house.post(CHAT, talk(LONG * 4, stream=True, max_tokens=40)), name="asks")
    await until(lambda: any(engine.taken for engine in engines))
    next(engine for engine in engines if not engine.taken).die_after = None
    found = summary((await dying).body)
    assert found["error"] is None
    assert found["text"] == TOKENIZER.decode(unbroken(ids_of(LONG * 4), 40)).rstrip("\ufffd")
    assert sum(len(engine.taken) for engine in engines) == 2


async def test_large_bodies_are_tokenised_in_processes_and_hashed_exactly(before: Open) -> None:
    engine = VllmEngine("vllm")
    house = await before(engine, large_body_bytes=1000)
    for _ in range(2):
        answer = await house.post(CHAT, talk(LONG * 4))
        assert answer.status == 200
        await computed(house, engine)
    assert [taken.rank for taken in engine.taken] == [engine.taken[0].rank] * 2
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    assert record["hashed"] == "ids"
    assert max(one["overlap_blocks"] for one in record["candidates"]) == len(ids_of(LONG * 4)) // BLOCK
