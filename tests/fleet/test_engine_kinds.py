"""The table of what Roost knows of each kind of engine and can do with it."""

from typing import Any, get_args

import msgspec
import pytest

from fleet.facts.engine_kinds import ABILITIES, KINDS, EngineKind, contradictions, stated_abilities
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.placement import linear

NOTHING = Capabilities(kv_events=False, load=False, experts=False, token_ids=False)


def joined(kind: str = "", **about: Any) -> EngineJoined:
    values: dict[str, Any] = {"urls": ("http://a",), "capabilities": NOTHING}
    return EngineJoined(
        engine="e",
        worker_id=1,
        engine_kind=kind,
        model="m",
        node="n",
        block_size=16,
        kv_blocks=0,
        max_context=1,
        max_batch_tokens=1,
        **values | about,
    )


def test_each_kind_has_an_entry_for_each_ability_and_says_what_it_depends_on() -> None:
    assert set(KINDS) == set(get_args(EngineKind))
    for record in KINDS.values():
        assert set(record.abilities) == set(ABILITIES)
        assert all(entry.note for entry in record.abilities.values() if entry.support == "depends")
        assert record.seen


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("kv", {"capabilities": msgspec.structs.replace(NOTHING, kv_events=True)}),
        ("load", {"capabilities": msgspec.structs.replace(NOTHING, load=True)}),
        ("experts", {"capabilities": msgspec.structs.replace(NOTHING, experts=True)}),
        ("rank", {"urls": ("http://a", "http://b")}),
        ("rank", {"urls": ("http://a", "http://a"), "rank_header": "X-rank"}),
        ("continuation", {"capabilities": msgspec.structs.replace(NOTHING, returns_ids=True)}),
        ("tenants", {"capabilities": msgspec.structs.replace(NOTHING, isolates_tenants=True)}),
        ("layout", {"tp_refusal": ""}),
        ("layout", {"unshardable": ""}),
    ],
)
def test_an_ability_is_read_from_the_join(name: str, about: dict[str, Any]) -> None:
    assert not stated_abilities(joined())[name]
    stated = stated_abilities(joined(**about))
    assert stated[name]
    assert not any(stated[other] for other in ABILITIES if other not in (name, "fields", "rank"))


def test_an_engine_that_moves_its_experts_itself_takes_no_shares() -> None:
    placement = linear(layers=1, experts=2, ranks=1).record()
    own = stated_abilities(joined(placement=placement))
    vllm = stated_abilities(joined(placement=placement, rearranges=True))
    assert (own["migration"], own["shares"], vllm["migration"], vllm["shares"]) == (True, True, True, False)


def test_one_rank_leaves_no_choice_and_ranks_behind_one_url_are_told_apart_by_a_header_alone() -> None:
    assert stated_abilities(joined())["rank"] is None
    assert stated_abilities(joined(urls=("http://a", "http://a")))["rank"] is False


def test_a_server_of_text_passes_all_fields_and_one_of_ids_those_that_it_says() -> None:
    assert stated_abilities(joined())["fields"]
    ids = msgspec.structs.replace(NOTHING, token_ids=True)
    assert not stated_abilities(joined(capabilities=ids))["fields"]
    both = msgspec.structs.replace(ids, passes_fields=True)
    assert stated_abilities(joined(capabilities=both))["fields"]


def test_an_engine_that_states_other_abilities_than_its_kind_contradicts_the_table() -> None:
    found = contradictions(joined("embedded", tp_refusal=""))
    assert set(found) == {"kv", "load", "experts", "continuation", "fields", "tenants", "migration", "shares"}
    assert found["kv"] == "the table says yes, the engine no"
    assert found["fields"] == "the table says no, the engine yes"


def test_kinds_of_other_versions_contradict_nothing() -> None:
    assert contradictions(joined("")) == contradictions(joined("of tomorrow")) == {}
