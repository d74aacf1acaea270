"""Answers of a real vLLM, recorded, through Roost's door: equal in status, headers and bytes to what the
server itself says."""

import io
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from fleet.facts.engines import Capabilities
from router.bodies import tasks
from router.tokenization.tokenizer import ModelTokenizer
from tests.compat.exchange import ask
from tests.compat.replay import RECORDED, Replay
from tests.compat.requests import ACCEPTED, OTHER_ROUTES, REFUSED, ClientRequest
from tests.router.router_fixture import OpenHouse, metric, until
from tests.web_server import served_web


@pytest.mark.parametrize(
    "requests", [ACCEPTED, REFUSED, OTHER_ROUTES], ids=["accepted", "refused", "other routes"]
)
async def test_what_vllm_answers_arrives_as_vllm_said_it(
    open_house: OpenHouse, requests: Sequence[ClientRequest]
) -> None:
    replay = Replay()
    async with served_web(replay.app()) as server, httpx.AsyncClient(timeout=30) as client:
        house = await open_house(bus=False, backends=(server,), probe_seconds=0.05)
        await until(lambda: house.service.view.models(live=True))
        different = []
        for sent in requests:
            direct, routed = await ask(client, server, sent), await ask(client, house.url, sent)
            if direct.comparable != routed.comparable:
                different.append(f"{sent.name}:\n  {direct.comparable}\n  {routed.comparable}")
        assert different == []
        assert replay.unknown == []


@pytest.fixture(scope="module")
def packed() -> bytes:
    """Tokenizer of the recorded server."""
    archive, folder = io.BytesIO(), Path("deploy/demo_model/checkpoint")
    with zipfile.ZipFile(archive, "w") as files:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            files.write(folder / name, name)
    return archive.getvalue()


@pytest.mark.parametrize(
    "requests", [ACCEPTED, REFUSED, OTHER_ROUTES], ids=["accepted", "refused", "other routes"]
)
async def test_so_it_does_from_an_engine_of_the_fleet_whose_prompts_are_hashed_by_their_ids(
    open_house: OpenHouse, packed: bytes, requests: Sequence[ClientRequest]
) -> None:
    replay = Replay()
    takes_text = Capabilities(kv_events=False, load=False, experts=False, token_ids=False, returns_ids=True)
    async with served_web(replay.app()) as server, httpx.AsyncClient(timeout=30) as client:
        house = await open_house()
        joined = await house.join(
            "vllm", [server], packed, model="tiny", capabilities=takes_text, max_context=1024, shape=None
        )
        await until(lambda: house.service.tokenizer(joined.tokenizer) is not None)
        different = []
        for sent in requests:
            direct, routed = await ask(client, server, sent), await ask(client, house.url, sent)
            if direct.comparable != routed.comparable:
                different.append(f"{sent.name}:\n  {direct.comparable}\n  {routed.comparable}")
        assert different == []
        assert replay.unknown == []
        assert metric(house.service.metrics, "prompts_differ_total") == 0


def test_prompts_are_tokenised_as_the_recorded_server_did(packed: bytes) -> None:
    """An answer with ids states the prompt's. What cannot be known here is left to the text."""
    tokenizer = ModelTokenizer.from_archive(packed)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["answers"]
    unknown, checked = set(), 0
    for sent in ACCEPTED:
        answer = recorded[sent.name].get("with_ids")
        stated = re.search(r'"prompt_token_ids":(\[[0-9,]*\])', answer["body"]) if answer else None
        made = tasks.foreign_prompt(sent.body, tokenizer, 1024, chat="chat" in sent.path)
        if made is None:
            unknown.add(sent.name)
        elif stated is not None:
            assert (sent.name, made.ids) == (sent.name, json.loads(stated[1]))
            checked += 1
    assert unknown == {
        "text several prompts",
        "text several prompts streamed",
        "text lists of ids",
        "text truncated prompt",
    }
    assert checked >= 40


def test_streams_recorded_with_and_without_ids_have_one_text() -> None:
    """Only then one may stand for the other in the replay."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["answers"]
    pairs = [
        (name, found["plain"]["body"], found["with_ids"]["body"])
        for name, found in recorded.items()
        if "with_ids" in found
    ]
    streams = [(name, plain, ids) for name, plain, ids in pairs if plain.startswith("data: ")]
    assert len(streams) >= 8
    assert [name for name, plain, ids in streams if _texts(plain) != _texts(ids)] == []


def _texts(stream: str) -> dict[int, str]:
    """By choice."""
    texts: dict[int, str] = {}
    for event in stream.split("\n\n")[:-1]:
        if event != "data: [DONE]":
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts
