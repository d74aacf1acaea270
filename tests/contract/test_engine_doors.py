"""Every engine has what it states and what the table of kinds (`fleet.facts.engine_kinds`) says of its kind: what
is declared and not there fails, and so does what is there and not declared."""

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from engine_adapter.batching.request_validation import GenerationRequest
from fleet.facts.engine_kinds import KINDS, contradictions, stated_abilities
from fleet.facts.engines import EngineJoined
from tests.contract.engine_doors import DOORS, PROMPT, Tried, announced, worked_at
from tests.router.dynamo.recorded import RECORDED
from tests.router.dynamo.test_workers import only

Look = Callable[[Tried], bool]
SEEN: dict[str, Look] = {
    "kv": lambda tried: bool(tried.kv),
    "load": lambda tried: tried.take().load.used_blocks > 0,
    "experts": lambda tried: tried.tokens > 0,
    "migration": lambda tried: tried.engine.placement is not None,
    "layout": lambda tried: (
        not (tried.engine.description.unshardable and tried.engine.description.tp_refusal)
    ),
}
"""Abilities that show in what a rank that has worked reports."""


@pytest.fixture(params=list(DOORS))
async def worked(request: pytest.FixtureRequest) -> AsyncIterator[Tried]:
    async with worked_at(request) as tried:
        yield tried


async def test_a_join_states_what_the_table_says_of_its_kind(
    worked: Tried, request: pytest.FixtureRequest
) -> None:
    joined = await announced(worked)
    assert joined.engine_kind == DOORS[request.node.callspec.params["worked"]]
    assert contradictions(joined) == {}


async def test_what_is_stated_is_there_and_what_is_not_stated_is_not(worked: Tried) -> None:
    worked.take()
    seen = {name: look(worked) for name, look in SEEN.items()}
    stated = stated_abilities(await announced(worked))
    assert seen == {name: stated[name] for name in SEEN}


async def test_an_engine_that_takes_ids_continues_an_answer_after_those_that_were_emitted(
    worked: Tried,
) -> None:
    takes_ids = (await announced(worked)).capabilities.token_ids
    assert takes_ids == hasattr(worked.engine, "submit")
    if not takes_ids:
        return
    whole = await worked.ask(max_tokens=9)
    answer = await worked.engine.submit(
        GenerationRequest(prompt=[*PROMPT, *whole.token_ids[:4]], max_tokens=5, ignore_eos=True, emitted=4)
    )
    rest = await answer.rest()
    assert rest.token_ids == whole.token_ids[4:]
    assert rest.outcome.prompt_tokens == len(PROMPT)


def test_workers_of_dynamo_state_what_the_table_says_of_them() -> None:
    """They join no bus: the router makes their joins from Dynamo's own records."""
    joined = only(RECORDED["records"]).joined
    assert joined.engine_kind == "dynamo"
    assert contradictions(joined) == {}


@pytest.mark.parametrize("door", list(DOORS))
def test_a_door_that_would_lack_an_ability_is_found_out(door: str) -> None:
    """The check itself is checked: a join without anything contradicts each ability that the table promises."""
    kind = DOORS[door]
    empty = msgspec.convert(
        {
            "kind": "EngineJoined",
            "engine": "e",
            "worker_id": 1,
            "engine_kind": kind,
            "model": "m",
            "node": "n",
            "urls": ["http://a", "http://a"],
            "block_size": 16,
            "kv_blocks": 0,
            "max_context": 1,
            "max_batch_tokens": 1,
            "capabilities": {"kv_events": False, "load": False, "experts": False, "token_ids": False},
        },
        EngineJoined,
    )
    promised = {name for name, entry in KINDS[kind].abilities.items() if entry.support == "yes"}
    assert promised - {"fields"} <= set(contradictions(empty))
