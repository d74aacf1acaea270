"""Pure parts of the benchmark of the time model: what a step computed, its group, its predicted duration."""

import numpy as np
import pytest

from benchmarks.rig.step_times.timed_engine import EngineStep
from benchmarks.rig.step_times.timed_rank import RawStep, TimedStep, evaluated
from benchmarks.step_model import RANKS, Case, Group, Measured, cases, layouts, spread
from fleet.experts import ModelShape
from fleet.timing import EngineSpeed, gathered_bytes

SHAPE = ModelShape(layers=2, experts=4, top_k=2, hidden=8, expert_intermediate=8)
SPEED = EngineSpeed(step=1.0, decode_sequence=0.1, decode_block=0.01, expert_read=1e-3, gather_byte=1e-6)
EP, EXPERTS_TP, TP = layouts(SHAPE)


def rank_step(**about: object) -> TimedStep:
    nothing = dict.fromkeys(
        ("prefill_tokens", "prefill_pairs", "sequences", "blocks", "remote", "surplus"), 0
    )
    return TimedStep(**{"seconds": 1.0, "forward_seconds": 1.0, "used": [], **nothing, **about})  # type: ignore[arg-type]


def test_a_step_is_known_by_its_prompts_its_decoding_sequences_and_where_their_experts_are() -> None:
    routed = np.array([[[0, 1], [2, 3]]] * 4)
    # Rank 1 has the last four of five tokens. Rank 0 serves all pairs of layer 0, rank 1 those of layer 1.
    served_by = [np.full((5, 2), rank) for rank in range(2)]
    step = RawStep([(3, 16), (1, 40)], routed, served_by, 0.5, 0.75, [1, 4])
    found = evaluated(step, 1, SHAPE)
    assert (found.seconds, found.forward_seconds) == (0.75, 0.5)
    assert (found.prefill_tokens, found.prefill_pairs) == (3, 17 + 18 + 19)
    assert (found.sequences, found.blocks) == (1, 3)
    assert found.remote == 4
    assert found.used == [0, 1, 6, 7]
    # Ten pairs on one rank of each layer. The own tokens have eight.
    assert found.surplus == 2 * (10 - 8)


def test_no_rank_of_sharded_layers_has_more_pairs_than_its_share() -> None:
    step = RawStep([(4, 0)], np.zeros((4, 2, 2), np.int64), [], 0.5, 0.75, [4, 0])
    assert evaluated(step, 0, SHAPE).surplus == 2 * 2 * (2 - 4)


def test_the_slowest_rank_sets_the_predicted_time_and_ranks_share_the_reads() -> None:
    ranks = (rank_step(sequences=1, blocks=5, used=[0, 1]), rank_step(sequences=3, blocks=4, used=[1, 6]))
    step = EngineStep(ranks, tensor_parallel=False)
    assert step.predicted(SPEED, SHAPE, EP.placement) == pytest.approx(1.0 + 0.3 + 0.04 + 1.5e-3)
    gathered = 4 * gathered_bytes(SHAPE, RANKS, SHAPE.layers) * 1e-6
    found = step.predicted(SPEED, SHAPE, EXPERTS_TP.placement)
    assert found == pytest.approx(1.0 + 0.3 + 0.04 + 1.5e-3 + gathered)


def test_under_tensor_parallel_attention_a_step_is_that_of_rank_0_and_each_rank_reads_its_part_of_all() -> (
    None
):
    one = rank_step(sequences=3, blocks=4, used=[0, 1, 6])
    speed = EngineSpeed(step=1.0, decode_sequence=0.1, decode_block=0.01, expert_read=1e-3, gather_byte=0.0)
    step = EngineStep((one, one), tensor_parallel=True)
    assert step.predicted(speed, SHAPE, TP.placement) == pytest.approx(1.0 + 0.3 + 0.04 + 3e-3)


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_the_steps_of_a_case_are_those_in_which_all_its_sequences_decode_or_only_prompts_are_computed(
    tensor_parallel: bool,
) -> None:
    decode, prompt = Case("decode", 4, 32, 24), Case("prompt", 1, 64, 1, alone=True)
    all_four = [rank_step(sequences=4)] * 2 if tensor_parallel else [rank_step(sequences=2)] * 2
    first = [rank_step(prefill_tokens=64, sequences=3), rank_step()]
    only = [rank_step(prefill_tokens=64), rank_step()]
    steps = [EngineStep(tuple(ranks), tensor_parallel) for ranks in (all_four, first, only)]
    assert [decode.has(step) for step in steps] == [True, False, False]
    assert [prompt.has(step) for step in steps] == [False, False, True]


def test_every_case_has_its_prompts_on_the_ranks_that_take_them() -> None:
    dice = np.random.default_rng(0)
    for case in cases([64], [1, 4]):
        for tensor_parallel in (False, True):
            made = case.prompts(dice, tensor_parallel)
            assert len(made) == RANKS
            assert sum(map(len, made)) == case.sequences
            assert {len(prompt) for own in made for prompt in own} == {case.prompt}
            if tensor_parallel or case.alone:
                assert not any(made[1:])


def test_rounds_differ_by_the_range_of_their_medians_relative_to_all_steps() -> None:
    assert spread([[1.0, 2.0, 9.0], [], [3.0]]) == pytest.approx((3.0 - 2.0) / 2.5)
    assert spread([[], [4.0, 4.0]]) == 0
    assert spread([[], []]) == 0


def test_the_error_of_a_group_is_the_median_of_its_starts() -> None:
    def start(predicted: float) -> Measured:
        return Measured(EP, "decode", np.array([1.0, 2.0, 3.0]), np.full(3, predicted), 0.0)

    group = Group([start(2.0), start(2.2), start(6.0)])
    assert group.errors(0.5) == pytest.approx([0.0, 0.1, 2.0])
    name, steps, median, _, predicted, error, lowest, highest, _ = group.row(0.5)
    assert (name, steps) == ("EP, decode", 9)
    assert (median, predicted) == pytest.approx((2000.0, 2200.0))
    assert (error, lowest, highest) == pytest.approx((10.0, 0.0, 200.0))
