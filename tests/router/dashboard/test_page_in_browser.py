"""The dashboard's page in a real browser, before a router of the test: rights, sizes of fleets, and what a
page may do. `tests/system/dashboard` compares figures before a whole fleet."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus import Message
from fleet.requests.layouts import EngineLayout, LayoutOption, LayoutsDescribed
from router.access.api_keys import key_line
from tests.browser import PAGES, WatchedBrowser, accessibility_faults, faultless_browser, needs_browser
from tests.router.dashboard.test_plan_timeline import committed, evaluated, planned, staged
from tests.router.dashboard.test_planner_topics import Planner, record_plan
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture
async def browser() -> AsyncIterator[WatchedBrowser]:
    async with faultless_browser() as browser:
        yield browser


async def test_a_page_without_the_right_shows_nothing_of_the_fleet(
    browser: WatchedBrowser, open_house: OpenHouse, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(key_line(name, "t", None, frozenset({name})) for name in ("admin", "metrics")))
    house = await open_house(api_key_file=str(keys))
    await house.join("secret-engine", ["http://127.0.0.1:1"], None)
    async with browser.dashboard(house.url, refused=True) as dashboard:
        page = dashboard.page
        for place in PAGES:
            await dashboard.open(place)
            assert await page.inner_text("h1") == "This router asks for a key"
            assert "secret-engine" not in await page.content()
            assert not await page.get_by_role("navigation").is_visible()
            assert await accessibility_faults(page) == []
        await page.get_by_label("API key").fill("metrics")
        await page.keyboard.press("Enter")
        await page.get_by_role("alert").wait_for()
        assert "admin" in await page.inner_text("[role=alert]")
        assert "secret-engine" not in await page.content()
        await page.get_by_label("API key").fill("admin")
        await page.keyboard.press("Enter")
        await page.get_by_role("link", name="secret-engine").wait_for()
        # The key is forgotten, and with it what it showed.
        await page.get_by_role("button", name="Forget key").click()
        assert await page.inner_text("h1") == "This router asks for a key"
        assert "secret-engine" not in await page.content()
        # A page is shown no longer than its key is valid.
        await page.get_by_label("API key").fill("admin")
        await page.keyboard.press("Enter")
        await page.get_by_role("link", name="secret-engine").wait_for()
        keys.write_text(key_line("other", "t", None, frozenset({"admin"})))
        await house.service.reload(lambda: house.service.config)
        await page.get_by_text("This router asks for a key").wait_for()
        assert "secret-engine" not in await page.content()


@pytest.mark.parametrize("ranks", [1, 512])
async def test_the_pages_work_with_one_rank_and_with_512(
    browser: WatchedBrowser, house: House, ranks: int
) -> None:
    engines = 1 if ranks == 1 else 64
    for engine in range(engines):
        urls = [f"http://127.0.0.1:{1 + rank}" for rank in range(ranks // engines)]
        await house.join(f"engine-{engine:02}", urls, None, worker_id=1 + engine)
    async with browser.dashboard(house.url) as dashboard:
        await dashboard.open("fleet")
        await dashboard.page.wait_for_selector("tbody th")
        tiles = await dashboard.tiles()
        assert tiles["Ranks live"][0] == f"{ranks} of {ranks}"
        assert len(await dashboard.rows("Engines as this router")) == engines
        for place in PAGES:
            await dashboard.open(place)
            await dashboard.page.wait_for_selector(".connection.live")
            width = await dashboard.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert width <= 0, f"{place} is wider than the window"


async def test_words_of_a_prompt_and_names_with_markup_do_nothing_to_a_page(
    browser: WatchedBrowser, open_house: OpenHouse, byte_archive: bytes, serve_rank: Serve
) -> None:
    house = await open_house()
    rank = await serve_rank(MockRank(byte_archive))
    name = "<img src=x onerror=window.harmed=1>"
    await house.join("a", [rank.url], byte_archive, engine_kind=name)
    answer = await house.post("/v1/chat/completions", chat("pomegranate"))
    async with browser.dashboard(house.url) as dashboard:
        await dashboard.open("fleet")
        await dashboard.page.get_by_text(name).wait_for()
        for place in (("requests",), ("requests", answer.headers["x-roost-decision-id"])):
            await dashboard.open(*place)
            await dashboard.page.wait_for_selector("tbody th")
            assert "pomegranate" not in await dashboard.page.content()
        assert await dashboard.page.evaluate("window.harmed === undefined")


async def test_the_policy_of_the_page_stops_scripts_styles_and_connections_of_others(
    browser: WatchedBrowser, house: House
) -> None:
    async with browser.dashboard(house.url) as dashboard:
        await dashboard.open("fleet")
        stopped = await dashboard.page.evaluate(
            """async () => {
                const stopped = [];
                addEventListener('securitypolicyviolation', event => stopped.push(event.effectiveDirective));
                const script = document.createElement('script');
                script.textContent = 'window.harmed = 1';
                const style = document.createElement('style');
                style.textContent = 'body { display: none }';
                document.head.append(script, style);
                await fetch('http://127.0.0.1:9/').catch(() => null);
                await new Promise(resolve => setTimeout(resolve, 50));
                return [stopped.sort(), window.harmed === undefined];
            }"""
        )
    assert stopped == [["connect-src", "script-src-elem", "style-src-elem"], True]
    browser.faults.clear()  # the console says what was stopped


async def test_the_loop_shows_a_harmful_plan_with_its_rollback_and_what_became_of_trust_and_budget(
    browser: WatchedBrowser, house: House
) -> None:
    await record_plan(house, planned("p1", handovers=1), staged(0, plan="p1"))
    await record_plan(house, committed(0, last=True, plan="p1"), evaluated("p1"))
    await record_plan(house, planned("r1", origin="rollback"), staged(0, plan="r1"))
    async with (
        house.bus.serve(house.subjects.loop, Planner().answer),
        browser.dashboard(house.url) as dashboard,
    ):
        await dashboard.open("loop")
        await dashboard.until(lambda: dashboard.rows("Plans, newest first"), "plans")
        newest, first = await dashboard.rows("Plans, newest first")
        assert (newest["Plan"], newest["By"], newest["Outcome"]) == ("r1", "rollback (weighted)", "under way")
        assert (first["Plan"], first["By"], first["Outcome"]) == ("p1", "planner (weighted)", "harmful")
        assert (newest["Handovers"], first["Handovers"]) == ("0 of 2", "1 of 1")
        kinds = await dashboard.page.locator("svg.timeline .span").evaluate_all(
            "spans => spans.map(span => span.classList[1])"
        )
        assert sorted(kinds) == ["planner", "rollback", "step", "step"]
        mark = await dashboard.page.locator("svg.timeline .mark.harmful").text_content()
        assert mark == "✕p1: harmful. steps became longer"
        (engine,) = await dashboard.rows("What the planner knows")
        assert engine["Trust in predictions"] == "50.0 %"
        assert engine["Bytes in this budget interval"] == "20 B of 100 B"
        await dashboard.page.get_by_role("button", name="Details of a p1").click()
        assert "steps became longer" in await dashboard.page.inner_text("tr.below")
        assert await accessibility_faults(dashboard.page) == []


async def test_layouts_warn_of_a_regret_that_nears_the_cost_of_a_switch(
    browser: WatchedBrowser, house: House
) -> None:
    await house.join("a", ["http://127.0.0.1:1", "http://127.0.0.1:2"], None)
    options = (
        LayoutOption(layout="ep", step_seconds=0.005, regret_seconds=0.0, cost_seconds=0.0),
        LayoutOption(layout="tp", step_seconds=0.004, regret_seconds=1.5, cost_seconds=2.0),
    )
    choice = EngineLayout(
        engine="a", worker_id=1, layout="ep", policy="regret", automatic=True, running=5, options=options
    )

    async def planner(_: Message) -> Message:
        return LayoutsDescribed(engines=(choice,))

    async with house.bus.serve(house.subjects.loop, planner), browser.dashboard(house.url) as dashboard:
        await dashboard.open("layouts")
        await dashboard.until(lambda: dashboard.rows("Layouts that the engine could"), "options")
        assert await dashboard.verdict() == "Regret nears the cost of a switch: a"
        (engine,) = await dashboard.rows("Layout of each engine")
        assert engine["Choice"] == "automatic (regret)"
        assert engine["Largest regret"] == "1.50 s (tp)"
        _, tp = await dashboard.rows("Layouts that the engine could")
        assert (tp["Cost of a switch"], tp["Regret of its cost"]) == ("2.00 s", "75.0 %")
