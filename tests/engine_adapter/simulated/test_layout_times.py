"""Times that a simulated engine states for its layouts follow from its speeds."""

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.placement import with_rows
from fleet.timing import gathered_bytes

FREE = dict.fromkeys(
    ("dispatch", "dispatch_node", "expert_read", "expert_pair", "gather_byte", "prefill_pair"), 0.0
)


def test_without_the_costs_of_experts_both_layouts_take_the_time_of_a_ranks_sequences_and_blocks() -> None:
    config = SimulatedConfig(
        time_scale=2.0, step=1e-3, decode_sequence=1e-4, decode_block=1e-6, prefill_token=1e-5, **FREE
    )
    ep, experts_tp = SimulatedEngine(config).layout_times
    assert (ep.layout, experts_tp.layout) == ("ep", "experts-tp")
    assert ep.seconds == experts_tp.seconds
    assert ep.sequences[0] == 1
    assert ep.sequences[-1] == 2 * config.max_running
    for context, row in zip(ep.contexts, ep.seconds, strict=True):
        for count, seconds in zip(ep.sequences, row, strict=True):
            own = -(-count // 2)
            expected = 1e-3 + own * (1e-4 + 1e-6 * -(-context // 16))
            assert seconds == pytest.approx(2.0 * expected)
    full = config.max_batch_tokens
    assert ep.prefill_token == pytest.approx(2.0 * (1e-3 + 1e-5 * full) / (2 * full))


def test_layouts_differ_by_what_ranks_send_and_by_the_most_loaded_one() -> None:
    speeds = {"step": 1e-3, "decode_sequence": 0.0, "decode_block": 0.0, "prefill_token": 0.0}
    pairs, nothing = FREE | {"expert_pair": 1e-6}, FREE | {"gather_byte": 1e-9}
    ep, experts_tp = SimulatedEngine(SimulatedConfig(**speeds, **pairs)).layout_times
    above = sum(seconds - 1e-3 for row in ep.seconds for seconds in row)
    assert above == pytest.approx(1e-6 * ep.surplus * len(ep.contexts) * sum(ep.sequences))
    assert np.array(experts_tp.seconds) == pytest.approx(1e-3)
    shape = SimulatedConfig().model_shape
    ep, experts_tp = SimulatedEngine(SimulatedConfig(**speeds, **nothing)).layout_times
    assert np.array(ep.seconds) == pytest.approx(1e-3)
    bytes_of = gathered_bytes(shape, 2, shape.layers) * np.array(experts_tp.sequences)
    assert np.array(experts_tp.seconds[0]) == pytest.approx(1e-3 + 1e-9 * bytes_of)


def test_an_engine_that_begins_with_sharded_layers_states_the_same_kinds() -> None:
    config = SimulatedConfig()
    whole = SimulatedEngine(config)
    half = with_rows(whole.placement, {0: None, 1: None}, epoch=0)
    for one, other in zip(whole.layout_times, SimulatedEngine(config, half).layout_times, strict=True):
        assert (one.sequences, one.contexts) == (other.sequences, other.contexts)
        assert np.array(one.seconds) == pytest.approx(np.array(other.seconds), rel=0.2)


@pytest.mark.parametrize("ranks", [1, 7])
def test_an_engine_that_cannot_shard_its_experts_states_none(ranks: int) -> None:
    engine = SimulatedEngine(SimulatedConfig(ranks=ranks))
    assert engine.layout_times == ()
    assert {rank.description.hardware for rank in engine.ranks} == {""}


def test_every_rank_describes_them() -> None:
    engine = SimulatedEngine(SimulatedConfig())
    for rank in engine.ranks:
        assert rank.description.layout_times == engine.layout_times != ()
        assert rank.description.hardware == "simulated demo"
