"""The dashboard in a real browser, before a fleet of eight simulated engines of eight ranks: what each page
shows is compared with `/metrics`, with decision records, and with what the command line shows."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.browser import (
    PAGES,
    Dashboard,
    WatchedBrowser,
    accessibility_faults,
    faultless_browser,
    needs_browser,
)
from tests.system.dashboard.figures import (
    SECRET,
    TIMES,
    USERS,
    asked,
    get,
    live_ranks,
    load,
    loads,
    number,
    reservations,
    samples,
    shows,
)
from tests.system.fleets import Fleet, leave_nothing, new_home, until

pytestmark = [pytest.mark.slow, needs_browser]

ENGINES, RANKS = 8, 8
FIRST_VIEW_SECONDS = 1.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    home = new_home(ROOST_PLANNER_CYCLE_SECONDS="3600")  # plans of operators alone, so that it is known which
    fleet = Fleet(home, "--engine", "simulated", "--engines", str(ENGINES), "--ranks", str(RANKS))
    until(lambda: live_ranks(fleet) == ENGINES * RANKS, "all ranks are live", 60.0)
    yield fleet
    leave_nothing(fleet)


@pytest.fixture
async def browser() -> AsyncIterator[WatchedBrowser]:
    async with faultless_browser() as browser:
        yield browser


@pytest.fixture
async def dashboard(browser: WatchedBrowser, fleet: Fleet) -> AsyncIterator[Dashboard]:
    async with browser.dashboard(fleet.router, color_scheme="light") as dashboard:
        yield dashboard


# The pages


async def test_fleet_shows_the_load_of_every_rank_as_metrics_state_it(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("fleet")
    for engine in range(ENGINES):
        await dashboard.page.get_by_role("button", name=f"Details of engine-{engine}").click()

    async def shown() -> dict[tuple[str, str], tuple[int, ...]]:
        return {
            (f"engine-{engine}", row["Rank"]): tuple(
                int(number(row[column]))
                for column in ("Requests", "Prefill queue (tokens)", "Tokens to emit", "KV blocks")
            )
            for engine in range(ENGINES)
            for row in await dashboard.rows(f"Ranks of engine-{engine}")
        }

    until(lambda: not any(requests for requests, *_ in loads(fleet).values()), "earlier requests have ended")
    with reservations(fleet, 24):
        stated = loads(fleet)
        assert sum(requests for requests, *_ in stated.values()) == 24
        assert len(stated) == ENGINES * RANKS

        async def agrees() -> bool:
            return await shown() == stated == loads(fleet)

        await dashboard.until(agrees, f"the load that /metrics states: {stated}")
        tiles = await dashboard.tiles()
        assert tiles["Engines live"] == (f"{ENGINES} of {ENGINES}", "demo")
        assert tiles["Ranks live"][0] == f"{ENGINES * RANKS} of {ENGINES * RANKS}"
        assert tiles["Requests at ranks"][0] == "24"
        assert shows(tiles["Prefill queue"][0], sum(prefill for _, prefill, *_ in stated.values()))
        assert await dashboard.verdict() == "Nothing is wrong."


async def test_fleet_follows_load_and_drains_without_being_loaded_again(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("fleet")
    async with load(fleet):

        async def busy() -> bool:
            (in_flight,) = samples(fleet, "roost_router_requests_in_flight").values()
            tile = (await dashboard.tiles())["Requests at ranks"]
            return in_flight == USERS and tile[1] == f"{USERS} of them through this router"

        await dashboard.until(busy, "the requests in flight that /metrics states")
        await asyncio.to_thread(fleet.home.output, "drain", "engine-2/1")

        async def state() -> str:
            return {row["Engine"]: row["State"] for row in await dashboard.rows("Engines")}["engine-2"]

        async def drains() -> bool:
            return await state() == "1 of 8 ranks draining"

        async def lives() -> bool:
            return await state() == "live"

        await dashboard.until(drains, "the drain")
        assert "engine-2 rank 1: drained by an operator" in await dashboard.page.inner_text(".problems")
        await asyncio.to_thread(fleet.home.output, "drain", "engine-2/1", "--undo")
        await dashboard.until(lives, "the end of the drain")


async def test_requests_shows_decision_records_and_nothing_of_a_prompt(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("requests")
    async with load(fleet):
        await dashboard.until(lambda: dashboard.rows("Recent decisions"), "decisions")
        await dashboard.page.get_by_role("button", name="Hold").click()
    rows = await dashboard.rows("Recent decisions")
    assert len(rows) > USERS
    for row in rows[:20]:
        record = fleet.decision(row["Decision"])
        assert row["Rank"] == record["chosen"]
        assert row["Why"] == record["why"]
        assert row["Prompt (tokens)"] == f"{record['prompt_tokens']:,}"
        assert int(row["Candidates"]) == len(record["candidates"])
        chosen = next(
            one for one in record["candidates"] if f"{one['engine']}/{one['rank']}" == record["chosen"]
        )
        assert shows(row["Predicted cost"], chosen["score"])
        assert shows(row["Next best"], record["margin"])
    # The filter asks the router.
    await dashboard.page.get_by_label("Engine").fill("engine-3")

    async def filtered() -> list[dict[str, str]]:
        found = await dashboard.rows("Recent decisions")
        return found if {row["Rank"].split("/")[0] for row in found} == {"engine-3"} else []

    assert await dashboard.until(filtered, "decisions for engine-3 only")
    assert SECRET not in await dashboard.page.content()


async def test_a_decision_is_opened_with_every_candidate_every_term_and_its_trace(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    async with load(fleet):
        first = fleet.http.post(
            "/v1/chat/completions",
            json={"model": "demo", "max_tokens": 4, "messages": asked(random.Random(5))},
        )
    record = fleet.decision(first.headers["x-roost-decision-id"])
    await dashboard.open("requests", record["id"])
    await dashboard.page.get_by_role("button", name="Show all 64 rows").click()
    rows = await dashboard.rows("Predicted added milliseconds")
    assert len(rows) == len(record["candidates"]) == ENGINES * RANKS
    widths = await dashboard.page.locator(".stack").evaluate_all(
        "stacks => stacks.map(stack => [...stack.children].map(one => [one.title.split(':')[0], parseFloat(one.style.width)]))"
    )
    highest = max(sum(one["terms_ms"].values()) for one in record["candidates"])
    for row, segments, one in zip(rows, widths, record["candidates"], strict=True):
        assert row["Candidate"].removesuffix(" ✓") == f"{one['engine']}/{one['rank']}"
        assert row["Candidate"].endswith("✓") == (f"{one['engine']}/{one['rank']}" == record["chosen"])
        assert shows(row["Score (ms)"], one["score"])
        terms = {term: value for term, value in one["terms_ms"].items() if value > 0}
        assert dict(segments) == pytest.approx({term: 100 * ms / highest for term, ms in terms.items()}, 1e-3)
        for term, ms in terms.items():
            assert shows(row[f"{term} (ms)"], ms)
    otherwise = {row["Assumption"]: row["Choice"] for row in await dashboard.rows("The choice under")}
    expected = {f"Without the term {term}": rank for term, rank in record["without"].items()}
    expected["Without the chosen rank"] = record["if_gone"]
    assert {name: rank.removesuffix(" (the same)") for name, rank in otherwise.items()} == expected
    assert record["trace_id"] in await dashboard.page.inner_text("main")
    until(lambda: record["trace_id"] in fleet.spans.read_text(), "the span of the request")
    assert SECRET not in await dashboard.page.content()


async def test_experts_and_loop_show_a_migration_as_placement_tracker_and_planner_state_it(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("experts", "engine-1")
    async with load(fleet):
        migrated = await asyncio.to_thread(
            fleet.home.output, "migrate", "--expert", "1/6", "--to", "engine-1/3"
        )
        plan = re.search(r"plan (\w+) of engine-1", migrated)
        assert plan is not None, migrated

        async def moved() -> bool:
            rows = {row["Engine"]: row for row in await dashboard.rows("Placement of each engine")}
            about = await dashboard.page.inner_text("section[aria-labelledby=engine-title] > .about")
            return rows["engine-1"]["Epoch"] == "1" and "epoch 1 ·" in about and "no demand" not in about

        await dashboard.until(moved, "epoch 1 and the demand known")
    popularity = json.loads(await asyncio.to_thread(fleet.home.output, "popularity", "--json"))
    placement = json.loads(await asyncio.to_thread(fleet.home.output, "placement", "--json"))["engine-1"]
    layers = await dashboard.rows("Layers")
    for row, known in zip(layers, popularity["layers"], strict=True):
        assert number(row[f"Hottest expert ({TIMES} even share)"]) == pytest.approx(
            known["max_over_mean"], rel=0.05
        )
        assert number(row["Top tenth of experts"]) == pytest.approx(known["top_tenth"], rel=0.05)
        hottest, holders = re.match(
            rf"(\d+) \([\d.]+{TIMES}, ranks? ([\d, ]+)\)", row[list(row)[-1]]
        ).groups()
        at = placement["expert_of_slot"][row["Layer"]]
        assert holders == ", ".join(str(rank) for rank, held in enumerate(at) if int(hottest) in held)
    tiles = await dashboard.tiles()
    mean = sum(known["max_over_mean"] for known in popularity["layers"]) / len(popularity["layers"])
    assert number(tiles["Hottest expert of a layer"][0]) == pytest.approx(mean, rel=0.05)
    # Arrow keys read single cells of a map.
    demand = dashboard.page.get_by_label("Demand. Arrow keys read single cells.")
    await demand.focus()
    for key in ("ArrowRight", "ArrowDown", *6 * ("ArrowRight",)):
        await demand.press(key)
    cell = await dashboard.page.locator("figure", has=demand).locator("output").inner_text()
    assert re.fullmatch(rf"Layer 1, expert 6: [\d.]+{TIMES} the even share; 1 replica", cell), cell
    assert "rank 3" in layers[1][list(layers[1])[-1]]
    await loop_shows(dashboard, fleet, plan[1])


async def loop_shows(dashboard: Dashboard, fleet: Fleet, plan: str) -> None:
    """Compare the page Loop with the planner's state, after one plan of an operator."""
    await dashboard.open("loop")
    stated = get(fleet, "/v1/loop")

    async def row() -> dict[str, str] | None:
        return next((one for one in await dashboard.rows("Plans, newest first") if one["Plan"] == plan), None)

    shown = await dashboard.until(row, f"plan {plan}")
    (known,) = (one for engine in stated["engines"] for one in engine["plans"] if one["plan"] == plan)
    assert (shown["Engine"], shown["By"], shown["Outcome"]) == ("engine-1", "operator", "committed")
    assert shown["Handovers"] == "1 of 1"
    assert shows(shown["Bytes"], known["bytes"])
    await dashboard.page.get_by_role("button", name=f"Details of engine-1 {plan}").click()
    assert (
        await dashboard.page.get_by_role("row", name=re.compile("^1 1 ")).count() == 1
    )  # handover 1, epoch 1
    engines = {row["Engine"]: row for row in await dashboard.rows("What the planner knows")}
    for engine in stated["engines"]:
        row_of = engines[engine["engine"]]
        assert row_of["Epoch"] == str(engine["epoch"])
        assert shows(row_of["Trust in predictions"], engine["plan_discount"])
        spent, budget = row_of["Bytes in this budget interval"].split(" of ")
        assert shows(spent, engine["spent_bytes"])
        assert budget == "29.8 GiB"
    assert stated["budget_bytes"] == 32_000_000_000
    picture = dashboard.page.get_by_role("img", name=re.compile("1 bars in 1 lanes"))
    assert f"{plan} by operator: committed" in (await picture.text_content() or "")


async def test_the_loop_is_paused_and_resumed_by_keyboard_after_confirmation(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("loop")
    keyboard = dashboard.page.keyboard
    await dashboard.until(
        lambda: dashboard.page.get_by_role("button", name="Pause…").is_visible(), "the button"
    )
    for _ in range(20):  # skip link, five pages, theme, button
        await keyboard.press("Tab")
        if await dashboard.page.evaluate("document.activeElement.textContent") == "Pause…":
            break
    await keyboard.press("Enter")
    dialog = dashboard.page.get_by_role("dialog", name="Pause")
    await dialog.wait_for()
    await keyboard.press("Escape")
    await dialog.wait_for(state="hidden")
    assert get(fleet, "/v1/loop")["paused"] is False
    assert await dashboard.page.evaluate("document.activeElement.textContent") == "Pause…"
    await keyboard.press("Enter")
    await dialog.wait_for()
    await dashboard.page.get_by_label("Reason").fill("an upgrade of the racks")
    await keyboard.press("Enter")
    await dialog.wait_for(state="hidden")
    until(lambda: get(fleet, "/v1/loop")["paused"], "the planner is paused")
    assert get(fleet, "/v1/loop")["paused_reason"] == "an upgrade of the racks"

    async def says(words: str) -> bool:
        return re.search(words, await dashboard.verdict()) is not None

    await dashboard.until(lambda: says("Paused since .*: an upgrade of the racks"), "the pause")
    # The next round's decision names it.
    await dashboard.page.get_by_role("button", name="Resume…").click()
    resume = dashboard.page.get_by_role("dialog", name="Resume")
    await resume.get_by_role("button", name="Resume").click()
    await dashboard.until(lambda: says("^Automatic: policy roost, plans every 60 min"), "the loop acts again")
    assert get(fleet, "/v1/loop")["paused"] is False


async def test_layouts_shows_measured_curves_and_follows_a_change_of_layout(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("layouts", "engine-4")
    stated = json.loads(await asyncio.to_thread(fleet.home.output, "layout", "engine-4", "--json"))[
        "engine-4"
    ]
    await dashboard.until(lambda: dashboard.rows("Decode steps by"), "curves")
    if await dashboard.page.get_by_role("button", name="Show all").count():
        await dashboard.page.get_by_role("button", name=re.compile("^Show all")).first.click()
    rows = await dashboard.rows("Decode steps by")
    for curve in stated["choice"]["curves"]:
        for row, sequences, seconds in zip(rows, curve["sequences"], curve["seconds"], strict=True):
            assert number(row["Sequences"]) == sequences
            assert shows(row[f"{curve['layout']} (ms)"], 1000 * seconds)
    await asyncio.to_thread(fleet.home.output, "layout", "engine-4", "--set", "experts-tp")

    async def sharded() -> bool:
        rows = {row["Engine"]: row for row in await dashboard.rows("Layout of each engine")}
        spans = await dashboard.rows("Layouts that the engine had")
        return rows["engine-4"]["Layout"] == "EXPERTS_TP: experts sharded" == spans[0]["Layout"]

    await dashboard.until(sharded, "the new layout")


async def test_the_first_view_comes_within_a_second(browser: WatchedBrowser, fleet: Fleet) -> None:
    seconds = []
    for _ in range(4):
        async with browser.dashboard(fleet.router) as dashboard:
            began = time.perf_counter()
            await dashboard.page.goto(f"{fleet.router}/dashboard")
            await dashboard.page.wait_for_selector("tbody th")
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < FIRST_VIEW_SECONDS, seconds  # another program may have had the machine for a moment


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_page_has_a_fault_of_accessibility(
    browser: WatchedBrowser, fleet: Fleet, scheme: str
) -> None:
    decision = fleet.http.post(
        "/v1/chat/completions", json={"model": "demo", "max_tokens": 4, "messages": asked(random.Random(6))}
    ).headers["x-roost-decision-id"]
    async with browser.dashboard(fleet.router, color_scheme=scheme) as dashboard:
        grounds = set()
        for place in (*((page,) for page in PAGES), ("requests", decision), ("experts", "engine-0")):
            await dashboard.open(*place)
            await dashboard.until(lambda: dashboard.page.locator("tbody th").count(), "a table")
            if place == ("fleet",):
                await dashboard.page.get_by_role("button", name="Details of engine-0").click()
            if place == ("loop",):
                await dashboard.page.get_by_role("button", name="Pause…").click()
            assert await accessibility_faults(dashboard.page) == [], place
            grounds.add(await dashboard.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == {"rgb(245, 246, 248)" if scheme == "light" else "rgb(16, 21, 29)"}


async def test_every_page_is_reached_by_keyboard_and_the_theme_is_kept(
    dashboard: Dashboard, fleet: Fleet
) -> None:
    await dashboard.open("layouts")
    keyboard = dashboard.page.keyboard
    await keyboard.press("Tab")
    assert await dashboard.page.evaluate("document.activeElement.textContent") == "Skip to content"
    await keyboard.press("Enter")
    for name in ("Fleet", "Requests", "Experts", "Loop", "Layouts"):
        link = dashboard.page.get_by_role("navigation").get_by_role("link", name=name)
        for _ in range(10):
            await keyboard.press("Shift+Tab")
            if await link.evaluate("link => link === document.activeElement"):
                break
        await keyboard.press("Enter")
        await dashboard.page.get_by_role("heading", level=1, name=name).wait_for()
        assert await dashboard.page.title() == f"{name} · Roost"
        assert await dashboard.page.evaluate("document.activeElement.id") == "main"
    for _ in range(2):  # system, light, dark
        await dashboard.page.get_by_role("button", name=re.compile("^Theme")).click()
    await dashboard.open("fleet")
    ground = await dashboard.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(16, 21, 29)"
