"""`GET /v1/loop` and `POST /v1/loop/pause`: the automatic control loop, over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bus import BusError, Message
from fleet.facts.engines import EngineLeft
from fleet.requests.control_loop import DescribeLoop, EngineLoop, LoopDescribed, PlanSummary, SetLoopState
from router.access.api_keys import key_line
from router.api import loop_routes
from tests.router.router_fixture import House, OpenHouse

LOOP, PAUSE = "/v1/loop", "/v1/loop/pause"


class Planner:
    """Answers as the planner does, and remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[Message] = []
        self.paused, self.reason = False, ""

    async def answer(self, request: Message) -> Message:
        self.requests.append(request)
        if isinstance(request, SetLoopState):
            self.paused, self.reason = request.paused, request.reason
        return LoopDescribed(
            policy="weighted",
            automatic=True,
            paused=self.paused,
            paused_reason=self.reason,
            budget_bytes=7,
            budget_seconds=60.0,
            cycle_seconds=5.0,
            engines=(
                EngineLoop(
                    engine="a",
                    worker_id=2**64 - 1,
                    epoch=3,
                    plan_discount=0.5,
                    plans=(
                        PlanSummary(
                            plan="p", origin="planner", policy="w", at=1.0, outcome="kept", copies=2, bytes=3
                        ),
                    ),
                ),
            ),
        )


async def test_the_state_is_the_planners_answer(house: House) -> None:
    planner = Planner()
    async with house.bus.serve(house.subjects.loop, planner.answer):
        answer = await house.get(LOOP)
    assert answer.status == 200
    assert (answer.json["paused"], answer.json["budget_bytes"]) == (False, 7)
    (engine,) = answer.json["engines"]
    assert (engine["engine"], engine["epoch"], engine["plan_discount"]) == ("a", 3, 0.5)
    assert engine["plans"][0]["outcome"] == "kept"
    assert planner.requests == [DescribeLoop()]


async def test_pausing_and_resuming_is_the_planners_to_do(house: House) -> None:
    planner = Planner()
    async with house.bus.serve(house.subjects.loop, planner.answer):
        paused = await house.post(PAUSE, {"paused": True, "reason": "load test"})
        resumed = await house.post(PAUSE, {"paused": False})
    assert (paused.json["paused"], paused.json["paused_reason"]) == (True, "load test")
    assert resumed.json["paused"] is False
    assert planner.requests == [
        SetLoopState(paused=True, reason="load test"),
        SetLoopState(paused=False, reason=""),
    ]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"paused": "yes"}', {"paused": True, "why": "typo"}, b"x" * 5000]
)
async def test_a_bad_body_changes_nothing(house: House, body: Any) -> None:
    planner = Planner()
    async with house.bus.serve(house.subjects.loop, planner.answer):
        assert (await house.post(PAUSE, body)).status in (400, 413)
    assert planner.requests == []


async def test_without_a_planner_the_answer_says_so(open_house: OpenHouse) -> None:
    for house in (await open_house(), await open_house(bus=False)):
        for answer in (await house.get(LOOP), await house.post(PAUSE, {"paused": True})):
            assert (answer.status, answer.json["error"]["code"]) == (503, "no_planner")


async def test_a_silent_planner_may_still_apply_the_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(loop_routes, "ANSWER_SECONDS", 0.05)
    async with house.bus.serve(house.subjects.loop, silent):
        answer = await house.post(PAUSE, {"paused": True})
    assert (answer.status, answer.json["error"]["code"]) == (504, "planner_silent")
    assert "may still apply" in answer.json["error"]["message"]


async def test_a_refusal_has_the_planners_reason(house: House) -> None:
    async def refuses(_: Message) -> Message:
        raise BusError("not the leader")

    async with house.bus.serve(house.subjects.loop, refuses):
        answer = await house.post(PAUSE, {"paused": True})
    assert (answer.status, answer.json["error"]["code"]) == (409, "refused")
    assert "not the leader" in answer.json["error"]["message"]


async def test_an_answer_of_another_kind_is_an_error(house: House) -> None:
    async def odd(_: Message) -> Message:
        return EngineLeft(engine="a", worker_id=1, reason="?")

    async with house.bus.serve(house.subjects.loop, odd):
        answer = await house.get(LOOP)
    assert answer.status == 502
    assert "EngineLeft" in answer.json["error"]["message"]


async def test_only_the_right_admin_opens_them(open_house: OpenHouse, tmp_path: Path) -> None:
    keys, rights = tmp_path / "keys", ("metrics", "admin", "infer", "route")
    keys.write_text("\n".join(key_line(name, "t", None, frozenset({name})) for name in rights))
    house, planner = await open_house(api_key_file=str(keys)), Planner()
    async with house.bus.serve(house.subjects.loop, planner.answer):
        for name in rights:
            header = {"authorization": f"Bearer {name}"}
            expected = 200 if name == "admin" else 403
            assert (await house.get(LOOP, header)).status == expected
            assert (await house.post(PAUSE, {"paused": True}, header)).status == expected
        assert (await house.post(PAUSE, {"paused": True})).status == 401
    assert planner.requests == [DescribeLoop(), SetLoopState(paused=True)]
