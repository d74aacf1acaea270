"""Speeds of whole steps, found from steps that the time model made up, are those that it made them up from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.embedded.component_speeds import StepTimes, expert_seconds
from fleet.experts import ModelShape
from fleet.layout import AttentionKind
from fleet.placement import linear, with_attention, with_rows
from fleet.timing import EngineSpeed, step_seconds

SHAPE = ModelShape(layers=2, experts=4, top_k=2, hidden=8, expert_intermediate=8)
PRICES = EngineSpeed(dispatch=1e-3, expert_read=1e-4, expert_pair=1e-5, gather_byte=1e-6)
ROUTED = np.array([[[0, 2], [1, 0]], [[0, 3], [1, 2]]])
"""Experts of two tokens of every rank, [tokens, layers, k]."""
seconds = st.floats(1e-7, 1e-2)


def one_step(
    speed: EngineSpeed, tokens: int = 0, pairs: float = 0, sequences: int = 0, blocks: int = 0
) -> float:
    zeros = np.zeros(1)
    return float(
        step_seconds(
            speed,
            prefill_tokens=np.array([tokens]),
            prefill_pairs=np.array([pairs]),
            sequences=np.array([sequences]),
            blocks=np.array([blocks]),
            remote_ranks=zeros,
            remote_nodes=zeros,
            distinct_experts=zeros,
            surplus=0.0,
        )[0]
    )


@given(
    st.builds(
        EngineSpeed,
        prefill_token=seconds,
        prefill_pair=seconds,
        step=seconds,
        decode_sequence=seconds,
        decode_block=seconds,
    ),
    st.integers(2, 64),
    st.integers(2, 32),
    st.integers(1, 512),
    st.integers(1, 1024),
)
def test_the_speed_behind_five_steps_is_found(
    speed: EngineSpeed, sequences: int, pages: int, tokens: int, cached: int
) -> None:
    times = StepTimes(
        alone=one_step(speed, sequences=1, blocks=1),
        together=one_step(speed, sequences=sequences, blocks=sequences),
        longer=one_step(speed, sequences=sequences, blocks=sequences * pages),
        prompt=one_step(speed, tokens=tokens, pairs=tokens * (tokens + 1) / 2),
        later=one_step(speed, tokens=tokens, pairs=tokens * (cached + (tokens + 1) / 2)),
    )
    found = times.speed(sequences=sequences, pages=pages, tokens=tokens, cached=cached)
    longest = max(times)
    for name in ("prefill_token", "prefill_pair", "step", "decode_sequence", "decode_block"):
        assert getattr(found, name) == pytest.approx(getattr(speed, name), abs=1e-9 * longest)


@given(st.tuples(*[st.floats(0, 1)] * 5), st.integers(1, 8), st.integers(1, 8))
def test_steps_of_a_busy_machine_never_give_a_speed_that_is_negative(
    times: tuple[float, ...], sequences: int, pages: int
) -> None:
    StepTimes(*times).speed(sequences=sequences, pages=pages, tokens=1, cached=0)  # it is checked there


def test_experts_cost_what_the_time_model_says_of_each_layout() -> None:
    whole = linear(layers=2, experts=4, ranks=2)
    owner = whole.expert_of_slot.shape[1] // 2
    served_by = [np.concatenate([ROUTED[:, layer] // owner] * 2) for layer in range(2)]

    def cost(attention: AttentionKind | None) -> float:
        if attention is None:
            return expert_seconds(PRICES, whole, SHAPE, ROUTED, served_by, 0)
        every = with_attention(with_rows(whole, {0: None, 1: None}, epoch=0), attention, epoch=0)
        return expert_seconds(PRICES, every, SHAPE, ROUTED, [], 0)

    # Layer 0 reads experts 0, 2, 3 and layer 1 reads 0, 1, 2. Of the eight pairs of each, rank 0 serves four
    # in layer 0 and six in layer 1. Rank 0 sends both tokens of layer 0, and one of layer 1.
    assert cost(None) == pytest.approx(6 / 2 * 1e-4 + 3 * 1e-3 + (6 - 4) * 1e-5)
    # Half of the bytes of four tokens go to the other rank and come back, in two layers.
    assert cost("dp") == pytest.approx(6 / 2 * 1e-4 + 4 * 2 * 2 * SHAPE.token_bytes / 2 * 1e-6)
    assert cost("tp") == pytest.approx(6 * 1e-4)
