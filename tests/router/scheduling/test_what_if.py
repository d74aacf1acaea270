"""Decisions under assumptions: terms that do not count, and ranks that are gone; requested over HTTP, over
the bus, and by the command.
"""

import asyncio
import re
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from fleet.completions import ApiError
from fleet.requests.routing import RouteRequested
from fleet.timing import EngineSpeed
from router.scheduling.decision_record import DecisionRecord, Supposed
from router.scheduling.what_if import parsed_query, supposed
from tests.router.router_fixture import House, OpenHouse, chat

SLOW_PREFILL = EngineSpeed(prefill_token=1e-2)
SLOW_STEPS = EngineSpeed(prefill_token=1e-4, step=0.2)


async def explained(house: House, query: str = "", body: Any = None) -> DecisionRecord:
    answer = await house.post(f"/v1/route{query}", body or chat())
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=DecisionRecord)


async def two_engines(open_house: OpenHouse, packed: bytes, **settings: Any) -> House:
    """Return two engines. "thinker" computes prompts slowly, "stepper" emits slowly. Prompts are short, so
    "thinker" is cheaper.
    """
    house = await open_house(**settings)
    await house.join("thinker", ["http://h:1"], packed, speed=SLOW_PREFILL)
    await house.join("stepper", ["http://h:2", "http://h:3"], packed, speed=SLOW_STEPS)
    return house


async def test_without_a_term_the_whole_decision_is_made_anew_and_says_so(
    open_house: OpenHouse, byte_archive: bytes
) -> None:
    house = await two_engines(open_house, byte_archive)
    plain = await explained(house)
    assert (plain.chosen, plain.why, plain.supposed) == ("thinker/0", "cheapest", None)
    assert plain.without["decode"].startswith("stepper/")
    assert plain.without["prefill"] == "thinker/0"
    assert plain.if_gone is not None
    assert plain.if_gone.startswith("stepper/")
    without = await explained(house, "?without=decode")
    assert without.chosen.startswith("stepper/")
    assert without.supposed == Supposed(without=("decode",))
    assert without.weights["decode"] == 0
    assert all(candidate.terms_ms.decode == 0 for candidate in without.candidates)
    assert "decode" not in without.without
    neither = await explained(house, "?without=decode&without=prefill&without=lockstep")
    assert {candidate.score for candidate in neither.candidates} == {0.0}
    assert neither.tied == 3


async def test_ranks_that_are_gone_are_excluded_with_that_reason(
    open_house: OpenHouse, byte_archive: bytes
) -> None:
    house = await two_engines(open_house, byte_archive)
    one = await explained(house, "?gone=thinker/0&gone=stepper/1")
    assert (one.chosen, one.why, one.if_gone) == ("stepper/0", "only", None)
    assert [(out.engine, out.rank, out.reason) for out in one.excluded] == [
        ("thinker", 0, "gone, as assumed"),
        ("stepper", 1, "gone, as assumed"),
    ]
    whole = await explained(house, "?gone=stepper")
    assert [candidate.engine for candidate in whole.candidates] == ["thinker"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "without=luck",
            (
                "there is no term 'luck' that could be left out; terms: prefill, queue, decode, experts,"
                " distinct, sharded, lockstep, handover"
            ),
        ),
        (
            "gone=nobody/0",
            "no rank or engine 'nobody/0' serves the model 'demo'; ranks: thinker/0, stepper/0, stepper/1",
        ),
        ("gone=thinker&gone=stepper", "every rank that serves the model 'demo' is assumed to be gone"),
        ("with=experts", "unknown query parameter 'with'"),
        ("without", "the query string cannot be read"),
        ("without=%ff", "there is no term"),
    ],
)
async def test_suppositions_that_make_no_sense_are_refused_with_what_would(
    open_house: OpenHouse, byte_archive: bytes, query: str, message: str
) -> None:
    house = await two_engines(open_house, byte_archive)
    answer = await house.post(f"/v1/route?{query}", chat())
    assert answer.status == 400
    assert message in answer.json["error"]["message"]


async def test_only_the_cost_has_terms_to_leave_out_and_reservations_suppose_nothing(
    open_house: OpenHouse, byte_archive: bytes
) -> None:
    house = await two_engines(open_house, byte_archive, policy="round_robin")
    answer = await house.post("/v1/route?without=experts", chat())
    assert (answer.status, answer.json["error"]["param"]) == (400, "without")
    record = await explained(house, "?gone=thinker")
    assert (record.policy, record.without) == ("round_robin", {})


def test_names_count_once_and_too_many_are_refused() -> None:
    assert parsed_query(b"") == Supposed()
    assert parsed_query(b"without=queue&gone=a%2F0&without=queue") == Supposed(
        without=("queue",), gone=("a/0",)
    )
    with pytest.raises(ApiError, match="2000 ranks are assumed to be gone"):
        supposed((), [f"e/{rank}" for rank in range(2000)])
    with pytest.raises(ApiError, match="cannot be read"):
        parsed_query(b"&".join([b"gone=x"] * 2000))


def test_the_buss_question_may_suppose_as_well() -> None:
    message = msgspec.msgpack.decode(
        msgspec.msgpack.encode(RouteRequested(body=b"{}", without=("experts",), gone=("e/0",))),
        type=RouteRequested,
    )
    assert supposed(message.without, message.gone) == Supposed(without=("experts",), gone=("e/0",))


async def explain(house: House, *arguments: str) -> str:
    """Return the output of `roost explain`, without line breaks."""
    found = await asyncio.to_thread(
        CliRunner(env={"COLUMNS": "300"}).invoke,
        app,
        ["explain", "hello there", "--router", house.url, *arguments],
    )
    assert found.exit_code == (1 if "nowhere/9" in arguments else 0), found.output
    return found.output


async def test_the_command_says_why_and_what_would_have_been(
    open_house: OpenHouse, byte_archive: bytes
) -> None:
    house = await two_engines(open_house, byte_archive)
    shown = await explain(house)
    assert "why: the lowest score; policy cost" in shown
    assert re.search(r"otherwise: stepper/\d without decode", shown)
    assert re.search(r"if thinker/0 were gone: stepper/\d", shown)
    shown = await explain(
        house, "--without", "decode", "--gone", "stepper/1", "--session", "s", "--tenant", "t"
    )
    assert "supposed: decode does not count, stepper/1 is gone" in shown
    assert "gone, as assumed" in shown
    assert "no rank or engine 'nowhere/9' serves the model 'demo'" in await explain(
        house, "--gone", "nowhere/9"
    )


def test_the_command_supposes_nothing_of_a_decision_that_was_made() -> None:
    for option in (["--without", "queue"], ["--gone", "e/0"], ["--session", "s"], ["--tenant", "t"]):
        found = CliRunner().invoke(app, ["explain", "--id", "1", *option])
        assert found.exit_code == 2
        assert "a served decision is shown as it was made" in found.output
