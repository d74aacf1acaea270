"""Static backends as operators see and drain them, over HTTP and with `roost status`, `top` and `drain`,
without a bus.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import Result

from router.access.api_keys import key_line
from router.config import BackendConfig
from tests.conftest import free_port
from tests.deploy.commands import roost
from tests.router.foreign_servers import ForeignServer, in_front_of, saying, serving
from tests.router.router_fixture import House, OpenHouse, chat, until

CHAT, BACKENDS = "/v1/chat/completions", "/v1/backends"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directory without a roost.toml and without a running fleet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def command(*arguments: str) -> Result:
    return await asyncio.to_thread(roost, *arguments)


async def listed(house: House) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await house.get(BACKENDS)).json["data"]
    return found


def holding(arrived: asyncio.Event, go_on: asyncio.Event) -> Any:
    """Answer only after a release."""

    async def answer(_: web.Request) -> web.Response:
        arrived.set()
        await go_on.wait()
        return web.json_response({"id": "held", "choices": []})

    return answer


async def test_a_backend_is_listed_with_its_models_load_speed_and_limit(open_house: OpenHouse) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()
    async with serving(ForeignServer("one", holding(arrived, go_on), models=("base", "adapter"))) as server:
        gpu = BackendConfig(
            name="gpu",
            url=server.url,
            max_requests=7,
            prompt_tokens_per_second=20_000.0,
            output_tokens_per_second=50.0,
        )
        house = await open_house(bus=False, named_backends=(gpu,))
        await until(lambda: house.service.view.models(live=True) == ["adapter", "base"])
        request = asyncio.create_task(house.post(CHAT, chat(model="adapter")))
        await arrived.wait()
        (backend,) = await listed(house)
        assert (backend["name"], backend["url"], backend["state"], backend["models"]) == (
            "gpu",
            server.url,
            "live",
            ["adapter", "base"],
        )
        assert (backend["requests"], backend["max_requests"]) == (1, 7)
        assert backend["speed"] == {
            "source": "stated",
            "prompt_tokens_per_second": pytest.approx(20_000.0),
            "output_tokens_per_second": pytest.approx(50.0),
        }
        go_on.set()
        assert (await request).status == 200
        assert (await listed(house))[0]["requests"] == 0


async def test_a_backend_of_unknown_speed_reports_none(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying({}))) as server:
        (backend,) = await listed(await in_front_of(open_house, server))
        assert backend["speed"] == {
            "source": "not measured",
            "prompt_tokens_per_second": None,
            "output_tokens_per_second": None,
        }


async def test_a_backend_that_never_answered_is_listed_as_such(open_house: OpenHouse) -> None:
    port = free_port()
    house = await open_house(bus=False, backends=(f"http://127.0.0.1:{port}",))
    (backend,) = await listed(house)
    assert (backend["name"], backend["state"], backend["models"]) == (
        f"127.0.0.1:{port}",
        "has not answered yet",
        [],
    )
    refused = await house.post(f"{BACKENDS}/127.0.0.1:{port}/drain", {})
    assert (refused.status, refused.json["error"]["code"]) == (409, "not_ready")


async def test_a_drained_backend_gets_no_new_requests_until_it_is_undone(open_house: OpenHouse) -> None:
    async with (
        serving(ForeignServer("one", saying({"id": "one"}))) as one,
        serving(ForeignServer("two", saying({"id": "two"}))) as two,
    ):
        house = await in_front_of(open_house, one, two, policy="round_robin")
        name = one.url.removeprefix("http://")
        drained = (await house.post(f"{BACKENDS}/{name}/drain", {"reason": "new fan"})).json
        assert drained["state"] == "draining: new fan"
        assert {(await house.post(CHAT, chat())).json["id"] for _ in range(4)} == {"two"}
        assert (await house.post(f"{BACKENDS}/{name}/drain", {"draining": False})).json["state"] == "live"
        assert {(await house.post(CHAT, chat())).json["id"] for _ in range(4)} == {"one", "two"}


async def test_an_unknown_backend_or_a_bad_body_is_refused_with_the_remedy(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server)
        unknown = await house.post(f"{BACKENDS}/other/drain", {})
        assert unknown.status == 404
        assert server.url.removeprefix("http://") in unknown.json["error"]["message"]
        name = server.url.removeprefix("http://")
        assert (await house.post(f"{BACKENDS}/{name}/drain", b"{")).status == 400
        assert (await house.post(f"{BACKENDS}/{name}/drain", b" " * 5000)).status == 413


async def test_listing_and_draining_need_rights(open_house: OpenHouse, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(
            key_line(f"rk_{right}", "t", None, frozenset({right})) + "\n"
            for right in ("infer", "metrics", "admin")
        )
    )
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server, api_key_file=keys)
        name = server.url.removeprefix("http://")

        def as_(right: str) -> dict[str, str]:
            return {"authorization": f"Bearer rk_{right}"}

        assert [(await house.get(BACKENDS, headers=as_(right))).status for right in ("infer", "metrics")] == [
            403,
            200,
        ]
        assert [
            (await house.post(f"{BACKENDS}/{name}/drain", {}, headers=as_(right))).status
            for right in ("metrics", "admin")
        ] == [403, 200]


async def test_status_and_top_show_the_backends_of_a_router_without_a_bus(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying({}), models=("base", "adapter"))) as server:
        house = await in_front_of(open_house, server)
        name = server.url.removeprefix("http://")
        for shown in (
            await command("status", "--url", house.url),
            await command("top", "--once", "--url", house.url),
        ):
            assert shown.exit_code == 0
            row = next(line for line in shown.output.splitlines() if line.startswith(name))
            assert row.split()[1:4] == ["live", "0/512", "0"]
            assert "not measured" in row
            assert "adapter, base" in row
        status = json.loads((await command("status", "--json", "--url", house.url)).output)
        assert status["backends"][0]["models"] == ["adapter", "base"]


async def test_status_finds_the_router_that_is_configured_where_no_bus_is(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server)
        (tmp_path / "roost.toml").write_text(f"[router]\nport = {house.url.rsplit(':', 1)[1]}\n")
        shown = await command("status")
        assert shown.exit_code == 0
        assert server.url in shown.output


async def test_drain_at_a_router_waits_until_nothing_runs_there(open_house: OpenHouse) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()
    async with serving(ForeignServer("one", holding(arrived, go_on))) as server:
        house = await in_front_of(open_house, server)
        name = server.url.removeprefix("http://")
        request = asyncio.create_task(house.post(CHAT, chat()))
        await arrived.wait()
        late = await command("drain", name, "--url", house.url, "--wait", "0")
        assert late.exit_code == 1
        assert "is not idle after 0 s" in late.output
        go_on.set()
        await request
        idle = await command("drain", name, "--url", house.url, "--wait", "30")
        assert (idle.exit_code, "and is idle" in idle.output) == (0, True)
        assert (await house.post(CHAT, chat())).json["error"]["code"] == "draining"
        undone = await command("drain", name, "--url", house.url, "--undo")
        assert "takes new requests again" in undone.output
        assert (await house.post(CHAT, chat())).status == 200
