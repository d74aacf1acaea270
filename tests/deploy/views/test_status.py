"""`roost status`: what is known of each engine, and what can be done with it."""

import pytest

from deploy.client.fleet_status import EngineNow, as_record
from deploy.views.status import abilities, engine_lines
from fleet.facts.engines import Capabilities
from fleet.placement import linear
from tests.fleet.test_engine_kinds import joined

PLACEMENT = linear(layers=1, experts=2, ranks=2).record()


def test_an_engine_says_what_it_has_and_what_it_lacks() -> None:
    urls = ("http://a", "http://b")
    own = joined("embedded", capabilities=Capabilities(isolates_tenants=True), placement=PLACEMENT, urls=urls)
    assert abilities(own) == (
        "embedded: exact KV, load, experts, choice of rank, continuation, tenants apart, migration, shares;"
        " without more fields, layouts"
    )


def test_of_a_server_little_is_known() -> None:
    assert abilities(joined("openai")) == (
        "OpenAI-compatible: more fields; without exact KV, load, experts, continuation, tenants apart,"
        " migration, shares, layouts"
    )


def test_a_kind_that_was_never_run_says_so() -> None:
    assert abilities(joined("sglang")).startswith("SGLang (never run with the real engine): ")


def test_a_kind_of_another_version_is_called_as_it_calls_itself() -> None:
    assert abilities(joined("tomorrow")).startswith("tomorrow: ")


@pytest.mark.parametrize("kind", ["", "vllm"])
def test_the_line_is_left_out_for_engines_of_older_versions_and_where_lines_are_short(kind: str) -> None:
    engine = EngineNow(joined(kind))
    lines = [line.plain for line in engine_lines(engine, each=True)]
    assert any("without" in line for line in lines) == bool(kind)
    assert not any("without" in line.plain for line in engine_lines(engine, each=False))
    assert as_record(engine)["kind"] == (kind or None)
    assert as_record(engine)["abilities"]["load"] is False
