"""`GET /v1/status` and `GET /v1/engines/{engine}/plan`: what operators' programs ask of a router."""

import json
from pathlib import Path

import pytest

from bus import BusError, Message
from fleet.facts.engines import RankDrained
from fleet.requests.plans import DescribePlan, PlanDescribed
from router.access.api_keys import key_line
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, until

STATUS, PLAN = "/v1/status", "/v1/engines/a/plan"


async def test_the_status_names_each_engine_and_rank_with_its_state(house: House) -> None:
    joined = await house.join("a", ["http://127.0.0.1:1", "http://127.0.0.1:2"], None)
    await house.bus.record(
        house.subjects.drains("a", 1),
        RankDrained(engine="a", worker_id=joined.worker_id, rank=1, draining=True, reason="new power supply"),
    )

    table = house.service.view.target_table("demo")
    await until(lambda: house.service.scheduler.health.exclusions(table, 0.0).every)
    record = (await house.get(STATUS)).json
    assert (record["router"], record["models"], record["waiting"]) == (house.service.tag, ["demo"], 0)
    engine = record["engines"][0]
    assert (engine["engine"], engine["worker_id"]) == ("a", str(joined.worker_id))
    assert [rank["state"] for rank in engine["ranks"]] == ["live", "draining: new power supply"]
    assert (engine["epoch"], engine["layout"], engine["kv_blocks"]) == (0, "dp, experts whole", 1000)


async def test_the_status_counts_open_requests(house: House, byte_archive: bytes, serve_rank: Serve) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("a", [rank.url], byte_archive)
    await house.post("/v1/route/reserve", chat())
    ranks = (await house.get(STATUS)).json["engines"][0]["ranks"]
    assert ranks[0]["requests"] == 1
    assert ranks[0]["prefill_tokens"] > 0


async def test_a_plan_comes_from_the_planner_as_asked_for(house: House) -> None:
    questions: list[Message] = []

    async def planner(question: Message) -> Message:
        questions.append(question)
        return PlanDescribed(engine="a", worker_id=1, record=json.dumps({"engine": "a"}).encode())

    async with house.bus.serve(house.subjects.describe_plan, planner):
        answer = await house.get(PLAN + "?policy=full&budget_bytes=7")
    assert (answer.status, answer.json) == (200, {"engine": "a"})
    assert questions == [DescribePlan(engine="a", policy="full", budget_bytes=7)]


async def test_without_a_plan_the_reason_is_the_planners(house: House) -> None:
    async def planner(_: Message) -> Message:
        raise BusError("engine a has reported too little")

    async with house.bus.serve(house.subjects.describe_plan, planner):
        answer = await house.get(PLAN)
    assert (answer.status, answer.json["error"]["code"]) == (409, "no_plan")
    assert "too little" in answer.json["error"]["message"]


async def test_without_a_planner_the_answer_says_so(open_house: OpenHouse) -> None:
    for house in (await open_house(), await open_house(bus=False)):
        answer = await house.get(PLAN)
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_planner")


async def test_a_budget_is_a_number_of_bytes(house: House) -> None:
    answer = await house.get(PLAN + "?budget_bytes=many")
    assert answer.status == 400
    assert "budget_bytes" in answer.json["error"]["message"]


@pytest.mark.parametrize(("path", "right"), [(STATUS, "metrics"), (PLAN, "admin")])
async def test_each_needs_its_right(open_house: OpenHouse, tmp_path: Path, path: str, right: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "\n".join(
            key_line(name, "t", None, frozenset({name})) for name in ("metrics", "admin", "infer", "route")
        )
    )
    house = await open_house(api_key_file=str(keys))
    for name in ("metrics", "admin", "infer", "route"):
        status = (await house.get(path, {"authorization": f"Bearer {name}"})).status
        assert (status == 403) == (name != right)
