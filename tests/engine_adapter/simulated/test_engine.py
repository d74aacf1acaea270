"""The simulated engine's clock: what a step lasts, who waits for whom, and what is reported of it. Time is
virtual."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.engine import DispatchCounts, EngineFailed
from engine_adapter.serving.generation import AnswerDelta
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from engine_adapter.simulated.rank import SimulatedRank
from fleet.placement import linear

pytestmark = pytest.mark.looptime

PLAIN = {
    "prefill_token": 0.001,
    "prefill_pair": 0.0,
    "step": 0.01,
    "decode_sequence": 0.0,
    "decode_block": 0.0,
    "dispatch": 0.0,
    "max_batch_tokens": 200,
}


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(SimulatedConfig(**{**PLAIN, "ranks": 2} | settings))
    runs = [asyncio.create_task(rank.run(), name="a rank under test") for rank in engine.ranks]
    await asyncio.sleep(0)
    yield engine
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)


async def ask(rank: SimulatedRank, tokens: int, max_tokens: int) -> AnswerDelta:
    return await (
        await rank.submit(GenerationRequest(prompt=list(range(1, tokens + 1)), max_tokens=max_tokens))
    ).rest()


async def test_a_request_takes_the_time_of_its_steps() -> None:
    async with running() as engine:
        began = engine.now
        await ask(engine.ranks[0], 150, 5)
        assert engine.now - began == pytest.approx(0.01 + 0.15 + 4 * 0.01, abs=1e-4)
        assert engine.steps == 5


async def test_a_long_prompt_is_computed_in_chunks_and_another_rank_waits_for_each() -> None:
    async with running() as engine:
        decoding = asyncio.create_task(ask(engine.ranks[1], 10, 30))
        while not engine.steps:  # noqa: ASYNC110 virtual time
            await asyncio.sleep(0.001)
        began = engine.now
        await ask(engine.ranks[0], 450, 1)
        assert engine.now - began == pytest.approx(3 * 0.01 + 0.45, abs=0.02)
        assert (await decoding).outcome is not None


async def test_time_runs_as_fast_as_it_is_told_to_and_speeds_are_reported_so() -> None:
    async with running(time_scale=0.1) as engine:
        began = engine.now
        await ask(engine.ranks[0], 150, 5)
        assert engine.now - began == pytest.approx(0.02, abs=1e-4)
        assert engine.ranks[0].description.speed.step == pytest.approx(0.001)
        assert engine.ranks[0].take_facts().load.step_seconds == pytest.approx(0.001, abs=1e-5)


async def test_the_decode_step_that_is_reported_is_forgotten_after_a_while() -> None:
    async with running() as engine:
        await ask(engine.ranks[0], 10, 5)
        assert engine.ranks[1].take_facts().load.step_seconds == pytest.approx(0.01, abs=1e-4)
        await asyncio.sleep(11)
        assert engine.ranks[1].take_facts().load.step_seconds is None


async def test_a_slow_rank_slows_all_and_a_handover_stops_them() -> None:
    async with running() as engine:
        engine.order(FaultOrder(fault="slow", rank=1, factor=3))
        began = engine.now
        await ask(engine.ranks[0], 1, 10)
        assert engine.now - began == pytest.approx(0.3, abs=0.01)
        engine.order(FaultOrder(fault="handover", seconds=2))
        assert engine.ranks[0].handover_seconds == pytest.approx(2)
        began = engine.now
        await ask(engine.ranks[0], 2, 1)
        assert engine.now - began == pytest.approx(2, abs=0.05)
        assert engine.ranks[0].handover_seconds == 0


async def test_remote_experts_cost_and_a_placement_that_is_given_is_served() -> None:
    whole = linear(layers=4, experts=32, ranks=1)
    lasted = []
    for ranks, placement in ((1, whole), (2, None)):
        async with running(ranks=ranks, dispatch=1e-3) as engine:
            served = SimulatedEngine(engine.config, placement)
            assert served.placement.ranks == ranks
            began = engine.now
            await ask(engine.ranks[0], 40, 1)
            lasted.append(engine.now - began)
    assert lasted[0] == pytest.approx(0.05, abs=1e-3)
    assert 40 * 4 * 0.9e-3 < lasted[1] - lasted[0] <= 40 * 4 * 1e-3
    with pytest.raises(ValueError, match="is not of"):
        SimulatedEngine(SimulatedConfig(ranks=3), whole)


async def test_busy_ranks_count_their_experts_now_and_then_and_idle_ones_at_once() -> None:
    async with running(activity_seconds=1.0) as engine:
        rank = engine.ranks[0]
        answering = asyncio.create_task(ask(rank, 20, 400))
        found = []
        while not answering.done():
            found.append(rank.take_facts().activations)
            await asyncio.sleep(0.05)
        found.append(rank.take_facts().activations)
        reported = [one for one in found if one is not None]
        assert 4 <= len(reported) <= 6
        assert sum(one.tokens for one in reported) == 20 + 399


async def test_what_is_sent_between_two_looks_adds_up_over_the_ranks_of_an_engine() -> None:
    async with running(ranks=4, dispatch=1e-6, activity_seconds=0.2) as engine:
        answering = [
            asyncio.create_task(ask(rank, 20 * number + 1, 30))
            for number, rank in enumerate(engine.ranks[1:])
        ]
        sent = [[], [], [], []]
        while not all(one.done() for one in answering):
            for taken, rank in zip(sent, engine.ranks, strict=True):
                taken += rank.take_facts().sent
            await asyncio.sleep(0.05)
        for taken, rank in zip(sent, engine.ranks, strict=True):
            taken += rank.take_facts().sent
            assert rank.take_facts().sent == ()
        totals = [functools.reduce(DispatchCounts.with_more, taken) for taken in sent]
    assert len(sent[0]) > 1
    assert [one.tokens for one in totals] == [0, *(20 * number + 1 + 29 for number in range(3))]
    assert {one.steps for one in totals} == {engine.steps}
    assert [one.step_seconds for one in totals] == pytest.approx([totals[0].step_seconds] * 4)
    assert all(np.array_equal(one.balance, totals[0].balance) for one in totals)
    assert (totals[0].balance < engine.steps).all()
    assert not totals[0].remote_ranks.any()
    assert sum(one.served for one in totals) == pytest.approx(
        np.full(4, float(sum(one.pairs for one in totals)))
    )
    for one in totals[1:]:
        assert (one.remote_ranks > one.tokens).all()
        assert (one.remote_ranks <= one.pairs - one.local + 1e-3 * one.pairs).all()


async def test_of_ended_requests_no_more_tokens_are_traced_than_allowed() -> None:
    async with running(profiled_tokens_per_second=100) as engine:
        for _ in range(20):
            await ask(engine.ranks[0], 90, 1)
        traced = len(engine.ranks[0].take_facts().ended)
        assert 1 <= traced <= 6
        await asyncio.sleep(2)
        await ask(engine.ranks[0], 90, 1)
        assert len(engine.ranks[0].take_facts().ended) == 1


async def test_all_ranks_end_with_the_engine_and_say_the_same() -> None:
    engine = SimulatedEngine(SimulatedConfig(ranks=3))
    runs = [asyncio.create_task(rank.run(), name="a rank under test") for rank in engine.ranks]
    await asyncio.sleep(0)
    runs[2].cancel()
    ends = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineFailed, EngineFailed, asyncio.CancelledError]
    assert str(ends[0]) == "rank 2 is stopping"


async def test_answers_end_by_themselves_where_lengths_are_simulated() -> None:
    async with running(output_tokens=20) as engine:
        outcomes = [(await ask(engine.ranks[0], 10 + number, 2000)).outcome for number in range(12)]
        assert {one.reason for one in outcomes if one is not None} == {"stop"}
        assert 5 < np.mean([one.completion_tokens for one in outcomes if one is not None]) < 60
        ignoring = await engine.ranks[0].submit(
            GenerationRequest(prompt=[1, 2], max_tokens=300, ignore_eos=True)
        )
        assert len((await ignoring.rest()).token_ids) == 300
