"""Answers of a real vLLM, recorded, through Roost's door: equal in status, headers and bytes to what the
server itself says."""

import json
from collections.abc import Sequence

import httpx
import pytest

from tests.compat.exchange import ask
from tests.compat.replay import RECORDED, Replay
from tests.compat.requests import ACCEPTED, OTHER_ROUTES, REFUSED, ClientRequest
from tests.router.router_fixture import OpenHouse, served_web, until


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
