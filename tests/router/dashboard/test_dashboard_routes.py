"""The dashboard over HTTP: what is shown to whom, and with which headers."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.access.api_keys import key_line
from router.dashboard import feed
from router.dashboard.feed import DashboardFeed
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat

PAGE, FEED, DECISIONS = "/dashboard", "/dashboard/feed?topics=", "/dashboard/decisions"


async def first_event(house: House, topics: str, headers: dict[str, str] | None = None) -> tuple[str, Any]:
    """The first event of a feed."""
    async with house.http.get(house.url + FEED + topics, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["cache-control"] == "no-store"
        name = ""
        async for line in answer.content:
            if line.startswith(b"event: "):
                name = line.decode().removeprefix("event: ").strip()
            if line.startswith(b"data: "):
                return name, json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the feed ended without an event")


async def test_the_page_and_its_files_are_locked_down_and_revalidated(house: House) -> None:
    page = await house.get(PAGE)
    assert page.status == 200
    assert b"<script>" not in page.body
    assert b"style=" not in page.body
    for path in (PAGE, "/dashboard/static/app.js", "/dashboard/static/pages/fleet.js"):
        answer = await house.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        again = await house.get(path, {"if-none-match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "../routes.py", "..%2froutes.py", "%2e%2e/routes.py"])
async def test_only_files_of_the_bundle_are_served(house: House, name: str) -> None:
    assert (await house.get(f"/dashboard/static/{name}")).status == 404


async def test_the_feed_shows_the_fleet_that_the_status_shows(house: House) -> None:
    await house.join("a", ["http://127.0.0.1:1", "http://127.0.0.1:2"], None)
    name, picture = await first_event(house, "fleet")
    status = (await house.get("/v1/status")).json
    assert name == "fleet"
    assert picture["router"] == status["router"]
    (engine,), (known,) = picture["engines"], status["engines"]
    assert (engine["engine"], engine["epoch"], engine["layout"]) == ("a", known["epoch"], known["layout"])
    assert engine["ranks"]["state"] == [rank["state"] for rank in known["ranks"]]


async def test_decisions_are_listed_found_and_opened_without_a_word_of_the_prompt(
    house: House, byte_archive: bytes, serve_rank: Serve
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("a", [rank.url], byte_archive)
    answers = [await house.post("/v1/chat/completions", chat(f"pomegranate {at}")) for at in range(3)]
    ids = [answer.headers["x-roost-decision-id"] for answer in answers]
    name, shown = await first_event(house, "decisions")
    assert name == "decisions"
    assert [row["id"] for row in shown["rows"]] == ids[::-1]
    found = await house.get(f"{DECISIONS}?model=demo&engine=a")
    assert [row["id"] for row in found.json["rows"]] == ids[::-1]
    assert (await house.get(f"{DECISIONS}?engine=b")).json["rows"] == []
    opened = await house.get(f"{DECISIONS}/{ids[0]}")
    assert opened.json == (await house.get(f"/v1/decisions/{ids[0]}")).json
    for body in (json.dumps(shown).encode(), found.body, opened.body):
        assert b"pomegranate" not in body


async def test_a_decision_names_the_trace_of_its_request(
    house: House, byte_archive: bytes, serve_rank: Serve
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("a", [rank.url], byte_archive)
    trace = "0af7651916cd43dd8448eb211c80319c"
    named = await house.post(
        "/v1/chat/completions", chat(), {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    )
    unnamed = await house.post("/v1/chat/completions", chat())
    for answer, expected in ((named, trace), (unnamed, None)):
        record = (await house.get(f"{DECISIONS}/{answer.headers['x-roost-decision-id']}")).json
        assert record["trace_id"] == expected


async def test_an_unknown_topic_is_refused_by_name(house: House) -> None:
    answer = await house.get(f"{FEED}fleet,weather")
    assert answer.status == 400
    assert "weather" in answer.json["error"]["message"]


async def test_only_a_key_with_the_right_admin_sees_anything(open_house: OpenHouse, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    rights = ("admin", "metrics", "infer", "route")
    keys.write_text("\n".join(key_line(name, "t", None, frozenset({name})) for name in rights))
    house = await open_house(api_key_file=str(keys))
    assert (await house.get(PAGE)).status == 200
    for path in (f"{FEED}fleet", DECISIONS, f"{DECISIONS}/{'0' * 20}"):
        assert (await house.get(path)).status == 401
        for name in rights[1:]:
            assert (await house.get(path, {"authorization": f"Bearer {name}"})).status == 403
    name, _ = await first_event(house, "fleet", {"authorization": "Bearer admin"})
    assert name == "fleet"


async def test_switched_off_there_is_no_dashboard(open_house: OpenHouse) -> None:
    house = await open_house(dashboard=False)
    for path in (PAGE, f"{FEED}fleet", "/dashboard/static/app.js"):
        assert (await house.get(path)).status == 404


async def test_the_number_of_pages_is_limited(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DashboardFeed, "open_pages", property(lambda _: feed.MAX_PAGES))
    answer = await house.get(f"{FEED}fleet")
    assert answer.status == 429
    assert answer.headers["retry-after"]
