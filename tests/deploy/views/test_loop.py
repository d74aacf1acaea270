"""`roost status` and `roost migration`: the loop's story in a screenful, and letting it rest."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
from rich.text import Text

from bus import BusError, Message, StoreUse
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client import control_loop
from deploy.client.control_loop import NoAnswer, described, set_paused
from deploy.client.fleet_status import EngineNow
from deploy.terminal.output import in_json
from deploy.views.loop import engine_report, overview, predicted_figures, sparkline
from deploy.views.status import Loop, alarms, fitting, loop_of, loop_record, stores_of
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineJoined
from fleet.requests.control_loop import LoopDescribed, SetLoopState
from fleet.requests.refusal import RequestRefused
from tests.deploy.loop_figures import ENGINE, KEPT, NOW, PREDICTED, ROLLBACK, START, loop

SUBJECTS = Subjects()


def engine_now(name: str, ranks: int = 4) -> EngineNow:
    about = {"engine": name, "worker_id": 7}
    urls = tuple(f"http://127.0.0.1:40{rank:03}" for rank in range(ranks))
    joined = EngineJoined(
        **about,
        model="m",
        node="n",
        urls=urls,
        block_size=16,
        kv_blocks=2048,
        max_context=512,
        max_batch_tokens=256,
    )
    loads = {
        rank: KvMetrics(
            worker_id=7, dp_rank=rank, running=3, waiting=1, active_prefill_tokens=120, kv_used_blocks=310
        )
        for rank in range(ranks)
    }
    return EngineNow(joined, EngineHeartbeat(**about, epoch=5), loads)


def screen(engines: int, ranks: int = 4, told: Loop | None = None) -> list[str]:
    names = [f"engine-{number}" for number in range(engines)]
    said = told or loop(*(msgspec.structs.replace(ENGINE, engine=name) for name in names))
    return plain(fitting([engine_now(name, ranks) for name in names], said, NOW, 39))


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


async def test_a_full_store_that_refuses_is_an_alarm_and_one_whose_oldest_makes_room_is_none() -> None:
    mib = 2**20
    blobs, log = (
        StoreUse("blobs", 480 * mib, 512 * mib, refuses=True),
        StoreUse("log", 256 * mib, 256 * mib, refuses=False),
    )
    assert [line.split(";")[0] for line in plain(alarms([blobs, log]))] == [
        "ALARM: the store for blobs is full: 480.0 of 512.0 MiB"
    ]
    assert not alarms(
        [StoreUse("blobs", 400 * mib, 512 * mib, refuses=True), StoreUse("parcels", 99, -1, refuses=True)]
    )
    bus = MemoryBus()
    assert {one.store for one in await stores_of(bus)} == {"log", "claims", "blobs", "parcels"}
    await bus.close()
    with pytest.raises(BusError):
        await bus.stores()
    assert await stores_of(bus) == ()


# The story


@pytest.mark.parametrize(
    ("engines", "ranks"), [(1, 4), (1, 16), (1, 64), (2, 4), (2, 8), (3, 4), (8, 4), (8, 8)]
)
def test_the_story_of_a_fleet_fits_on_a_screen(engines: int, ranks: int) -> None:
    lines = screen(engines, ranks)
    assert len(lines) <= 39
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert all(any(f"engine-{number}" in line for line in lines) for number in range(engines))
    assert any("engine-0" in line and "epoch 5" in line for line in lines)


def test_what_is_measured_stands_beside_the_start_and_what_was_foretold() -> None:
    said = "\n".join(screen(1))
    for words in (
        "loop: automatic, policy roost, plans every 30 s, may copy 32 GB in 15 min",
        "1.442      1.969      1.430        -26.8%",
        "+26.9 points",
        "9.1 ms",
        "balance by layer",
        "0.850 to 0.964",
        "discount 0.85; 12.3 MB of the budget spent, 32 GB left; 40 MB moved in all; 3",
        "decided 12 s ago (planned again in 18 s): no plan: nothing is to be gained",
        "9 clusters have one",
        "aborted: rank 1 has no free cell",
        "1.97>1.43 (1.97>1.44) -11.3% (-10.8%)",
        "by rollback",
        "running",
    ):
        assert words in said, words


def test_what_was_given_up_is_no_promise() -> None:
    assert "predicted" in "\n".join(plain(engine_report(loop(), ENGINE, NOW)))
    given_up = msgspec.structs.replace(
        ENGINE,
        plans=(
            msgspec.structs.replace(KEPT, outcome="aborted: room"),
            msgspec.structs.replace(KEPT, outcome="under way"),
        ),
    )
    said = plain(engine_report(loop(), given_up, NOW))
    assert not any("at start   predicted" in line for line in said)
    assert any("under way" in line for line in said)
    undone = msgspec.structs.replace(ENGINE, plans=(ROLLBACK, KEPT))
    assert not any("at start   predicted" in line for line in plain(engine_report(loop(), undone, NOW)))


def test_a_loop_that_has_done_nothing_yet_says_so() -> None:
    fresh = msgspec.structs.replace(
        ENGINE,
        measured=None,
        layers=None,
        at_start=None,
        decided_at=None,
        next_seconds=None,
        plans=(),
        homes=0,
        homes_note="",
    )
    said = "\n".join(plain(engine_report(loop(), fresh, NOW)))
    for words in (
        "no recent measurements",
        "no decision yet; the engine is planned on request only",
        "no plan was carried out yet",
    ):
        assert words in said


def test_a_pause_is_what_is_said_first_with_its_reason() -> None:
    assert plain(overview(loop(paused=True, paused_reason="new fan", paused_at=NOW - 300), NOW))[
        0
    ].startswith("loop: PAUSED for 5 min: new fan; roost migration resume")
    assert "acts on request only" in plain(overview(loop(automatic=False), NOW))[0]


def test_words_from_the_bus_give_the_terminal_no_commands_and_numbers_that_are_none_are_dashes() -> None:
    odd = msgspec.structs.replace(
        ENGINE,
        decided="\x1b[2Jgone\r",
        measured=msgspec.structs.replace(ENGINE.measured, remote_ranks=math.nan),
    )  # type: ignore[type-var]
    said = plain(engine_report(loop(), odd, NOW))
    assert all(line.isprintable() for line in said)
    assert said[1].split()[3:] == ["token", "-", "1.969", "1.430", "-"]


def test_a_sparkline_shows_the_worst_of_each_group_of_many_layers() -> None:
    assert sparkline([0.0, 1.0, math.nan, 0.5]).split("  ")[1] == "0.000 to 1.000"
    assert sparkline([0.25] * 3).endswith("  0.250")
    assert sparkline([math.nan]) == "-"
    assert sparkline([-1.7e308, 1.7e308])
    bars = sparkline([*([1.0] * 99), 0.0], min).split("  ")[0]
    assert len(bars) <= 36
    assert (bars[0], bars[-1]) == ("█", "▁")


def test_a_step_is_foretold_as_a_share_of_the_one_that_was_measured() -> None:
    model = {
        "predicted_before": msgspec.structs.replace(START, step_seconds=0.002),
        "predicted_after": msgspec.structs.replace(PREDICTED, step_seconds=0.001),
    }
    found = predicted_figures((msgspec.structs.replace(KEPT, **model),))
    assert found is not None
    assert found.step_seconds == pytest.approx(START.step_seconds / 2)
    alone = predicted_figures((msgspec.structs.replace(KEPT, **model, measured_before=None),))
    assert alone is not None
    assert alone.step_seconds == 0.001


# Who answers


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus()
    yield bus
    await bus.close()


async def test_without_a_planner_the_rest_is_told_and_that_none_answers(bus: MemoryBus) -> None:
    silent = await loop_of(bus, SUBJECTS)
    assert isinstance(silent, NoAnswer)
    assert "no planner reports its state" in "\n".join(screen(1, told=silent))
    record = json.loads(in_json(loop_record(silent)))
    assert record["loop"] is None
    assert "older version" in record["loop_unknown"]


async def test_a_planner_that_declines_is_quoted(bus: MemoryBus) -> None:
    async def decline(message: Message) -> Message:
        return RequestRefused(reason="this one only stands by")

    async with bus.serve(SUBJECTS.loop, decline):
        with pytest.raises(NoAnswer, match="this one only stands by"):
            await described(bus, SUBJECTS)
        with pytest.raises(NoAnswer, match="this one only stands by"):
            await set_paused(bus, SUBJECTS, True, "", lambda _: None)


async def test_pausing_is_asked_of_the_planner_and_what_it_says_comes_back(bus: MemoryBus) -> None:
    received: list[Message] = []

    async def steer(message: Message) -> Message:
        received.append(message)
        return loop(paused=isinstance(message, SetLoopState) and message.paused)

    async with bus.serve(SUBJECTS.loop, steer):
        assert (await set_paused(bus, SUBJECTS, True, "new fan", lambda _: None)).paused
        assert received == [SetLoopState(paused=True, reason="new fan")]
        told = await loop_of(bus, SUBJECTS)
    assert isinstance(told, LoopDescribed)
    assert not told.paused


async def test_a_planner_that_takes_over_is_waited_for_and_then_given_up(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_loop, "TAKEOVER_SECONDS", 0.01)
    said: list[str] = []
    with pytest.raises(NoAnswer, match="nothing was changed"):
        await set_paused(bus, SUBJECTS, True, "", said.append)
    assert said == ["no planner is running; waiting for one to take over"]


@pytest.mark.looptime
@pytest.mark.parametrize("then", ["hangs", "is gone", "declines"])
async def test_where_a_planner_may_have_heard_it_is_not_said_that_nothing_was_changed(
    bus: MemoryBus, then: str
) -> None:
    asked: list[Message] = []

    async def hang(message: Message) -> Message:
        asked.append(message)
        if len(asked) > 1 and then == "declines":
            return RequestRefused(reason="this one only stands by")
        await asyncio.sleep(4.0)
        return loop(paused=True)

    said: list[str] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bus.serve(SUBJECTS.loop, hang))
        pausing = asyncio.ensure_future(set_paused(bus, SUBJECTS, True, "", said.append))
        if then == "is gone":
            await asyncio.sleep(3.5)
            await stack.aclose()
        with pytest.raises(NoAnswer, match=r"the outcome is unknown.*roost migration status") as told:
            await pausing
    assert "nothing was changed" not in str(told.value)
    assert ("only stands by" in str(told.value)) == (then == "declines")
    assert said == ["the planner does not answer; asking again"]
    assert len(asked) == {"hangs": 4, "is gone": 1, "declines": 2}[then]
