"""The load of an engine from the reports of its targets."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.facts.dynamo_kv import KvMetrics
from migration.engine_state.engine_loads import EngineLoads

counts = st.integers(0, 50)


def report(rank: int, running: int, waiting: int = 0, prefill: int = 0, blocks: int = 0) -> KvMetrics:
    return KvMetrics(
        worker_id=1,
        dp_rank=rank,
        running=running,
        waiting=waiting,
        active_prefill_tokens=prefill,
        active_decode_blocks=blocks,
        kv_used_blocks=blocks + 1,
        step_seconds=0.01,
    )


@given(st.lists(st.tuples(st.integers(0, 4), counts, counts, counts, counts), max_size=40))
def test_sums_are_those_of_the_last_report_of_each_target(
    reports: list[tuple[int, int, int, int, int]],
) -> None:
    loads, last = EngineLoads(16), {}
    for each in reports:
        loads.apply(report(*each))
        last[each[0]] = each
    assert loads.running == sum(each[1] for each in last.values())
    assert loads.waiting == sum(each[2] for each in last.values())
    assert loads.prefill_tokens == sum(each[3] for each in last.values())
    assert loads.decode_blocks == sum(each[4] for each in last.values())
    assert loads.used_blocks == sum(each[4] + 1 for each in last.values())


def test_a_step_counts_at_a_load_that_has_not_changed() -> None:
    loads = EngineLoads(16)
    assert loads.apply(report(0, 3, blocks=9)) is None
    measured = loads.apply(report(0, 3, blocks=12))
    assert measured is not None
    assert (measured.sequences, measured.context, measured.seconds) == (3, 64.0, 0.01)
    assert loads.apply(report(0, 3, prefill=5, blocks=12)) is None
    assert loads.apply(report(0, 3, waiting=1, blocks=12)) is None


def test_prompt_tokens_count_as_they_are_computed_and_decoding_counts_as_none() -> None:
    loads = EngineLoads(16)
    for rank, prefill in ((0, 100), (1, 60), (0, 40), (1, 60), (0, 90), (1, 0), (0, 0)):
        loads.apply(report(rank, 3, prefill=prefill))
    assert loads.prefilled == 60 + 60 + 90
    for running in (8, 64, 2, 0):
        loads.apply(report(0, running))
    assert loads.prefilled == 210


def test_targets_of_another_layout_are_forgotten() -> None:
    loads = EngineLoads(16)
    loads.apply(report(0, 3))
    loads.apply(report(1, 4, blocks=5))
    loads.reset()
    loads.apply(report(0, 2, blocks=2))
    assert (loads.running, loads.decode_blocks, loads.context) == (2, 2, 16.0)


def test_missing_and_negative_figures_count_as_nothing() -> None:
    loads = EngineLoads(16)
    loads.apply(KvMetrics(worker_id=1, running=-4))
    assert (loads.running, loads.context) == (0, 0.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e9, None])
def test_impossible_durations_are_no_steps(seconds: float | None) -> None:
    loads = EngineLoads(16)
    loads.apply(report(0, 3))
    assert loads.apply(msgspec.structs.replace(report(0, 3), step_seconds=seconds)) is None
