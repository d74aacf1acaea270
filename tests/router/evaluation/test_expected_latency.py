"""Expected times of first tokens and steps, compared with the formulas of the time model."""

import numpy as np
import pytest

from fleet.layout import AttentionKind, Layout, experts_tp, tp
from fleet.placement import linear, with_attention, with_rows
from fleet.timing import EngineSpeed, step_seconds
from router.evaluation.expected_latency import NONE, ExpectedStepTime, Surcharge, first_token, step
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES
from tests.router.scheduling.test_decision import decided, view_of

SPEED = EngineSpeed(prefill_token=1e-3, prefill_pair=1e-6, step=0.01, decode_sequence=1e-3, decode_block=1e-5)


def priced(
    load: dict[int, int], surcharge: Surcharge = NONE, overlap: int = 0, prompt: int = 100
) -> tuple[tuple[float, float], float]:
    """Return ((prefill, beside), step) of one rank with this load."""
    view, _ = view_of({"ranks": 1, "speed": SPEED, "max_batch_tokens": 64})
    table = np.zeros((AMOUNTS, 1), np.int64)
    for row, amount in load.items():
        table[row] = amount
    decision = decided(view.target_table("demo"), load=table, overlap=[overlap], prompt=prompt)
    return first_token(decision, surcharge), step(decision, surcharge)


def test_a_first_token_takes_its_prefill_and_what_waits_before_it_in_steps_that_others_share() -> None:
    (prefill, beside), one_step = priced({PREFILL: 50, SEQUENCES: 3, BLOCKS: 200}, overlap=10)
    assert one_step == pytest.approx(0.01 + 4e-3 + 2e-3)
    assert prefill == pytest.approx((60 + 50) * 1e-3 + 60 * (100 - 30) * 1e-6)
    assert beside == pytest.approx(2.5 * one_step)  # 110 tokens take two chunks of 64


def test_experts_add_what_is_sent_and_what_is_read() -> None:
    experts = Surcharge(reading=0.02, all_experts=0.5, hit=0.25, token=(1e-4,))
    (prefill, beside), one_step = priced({}, experts)
    assert prefill == priced({})[0][0]
    assert one_step == pytest.approx(0.01 + 0.02 + 1e-3 + 1e-4)
    assert beside == pytest.approx(2.5 * one_step + 2 * (0.5 - 0.02) + 100 * 1e-4, rel=1e-6)
    assert experts.of_chunk(1) == pytest.approx(0.125)
    assert Surcharge(reading=0.2, all_experts=0.5, hit=0.25).of_chunk(1) == 0.2
    assert experts.of_token(7) == 0.0


def test_the_ranks_of_an_engine_step_as_long_as_the_slowest() -> None:
    pace, zeros = ExpectedStepTime(SPEED, 2), np.zeros(2)
    pace.reported(0, 5, 100)
    found = pace.reported(1, 9, 10, Surcharge(reading=0.5))
    alone = step_seconds(
        SPEED,
        prefill_tokens=zeros,
        prefill_pairs=zeros,
        sequences=np.array([5, 9]),
        blocks=np.array([100, 10]),
        remote_ranks=zeros,
        remote_nodes=zeros,
        distinct_experts=zeros,
        surplus=0.0,
    )
    assert found == pytest.approx(0.5 + float(alone.max()))
    assert pace.reported(1, 0, 0) == pytest.approx(float(alone[0]))


def test_the_chunks_of_an_engine_that_is_one_target_are_those_of_its_ranks_together() -> None:
    sharded = with_rows(linear(layers=2, experts=4, ranks=2), {0: None, 1: None}, epoch=1)
    about = {"ranks": 2, "speed": SPEED, "max_batch_tokens": 64}
    layouts: list[tuple[AttentionKind, Layout]] = [("dp", experts_tp(2)), ("tp", tp(2))]
    steps = []
    for attention, layout in layouts:
        view, _ = view_of(dict(about))
        view.place(1, with_attention(sharded, attention, epoch=1), layout)
        table = view.target_table("demo")
        decision = decided(table, load=np.zeros((AMOUNTS, len(table.targets)), np.int64), prompt=128)
        steps.append(first_token(decision).beside / step(decision))
    assert steps == pytest.approx([2.5, 1.5])
