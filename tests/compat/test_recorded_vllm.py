"""Answers of a real vLLM, recorded, through Roost's door: equal in status, headers and bytes to what the server itself says."""

from collections.abc import Sequence

import httpx
import pytest

from tests.compat.exchange import ask
from tests.compat.replay import Replay
from tests.compat.requests import ACCEPTED, OTHER_ROUTES, REFUSED, Asked
from tests.router.houses import OpenHouse, served_web, until


@pytest.mark.parametrize("requests", [ACCEPTED, REFUSED, OTHER_ROUTES], ids=["accepted", "refused", "other routes"])
async def test_what_vllm_answers_arrives_as_vllm_said_it(open_house: OpenHouse, requests: Sequence[Asked]) -> None:
    replay = Replay()
    async with served_web(replay.app()) as server, httpx.AsyncClient(timeout=30) as client:
        house = await open_house(bus=False, backends=(server,), probe_seconds=0.05)
        await until(lambda: house.service.view.models(live=True))
        different = []
        for asked in requests:
            direct, routed = await ask(client, server, asked), await ask(client, house.url, asked)
            if direct.comparable != routed.comparable:
                different.append(f"{asked.name}:\n  {direct.comparable}\n  {routed.comparable}")
        assert different == []
        assert replay.unknown == []
