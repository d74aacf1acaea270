"""Switches of attention between random steps of serving: every byte, book and request is right after each."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.batching import kv_cache
from engine_adapter.kv_switch.kv_state import SwitchRefused
from fleet.blocks import chain
from fleet.layout import head_groups
from tests.engine_adapter.kv_switch.kv_fixture import SwitchableEngine

PREFIXES = [[0] * 9, [0] * 4 + [1] * 9, [2] * 16, []]

shapes = st.sampled_from([(1, 4), (2, 4), (2, 1), (4, 4), (4, 2), (4, 1), (3, 3)])  # ranks, KV heads


def serve_and_switch(engine: SwitchableEngine, dice: random.Random, actions: int) -> int:
    """Take random actions, then serve all requests to their end. Return the number of switches."""
    switches = 0
    for _ in range(actions):
        action = dice.random()
        if action < 0.3:
            prompt = dice.choice(PREFIXES) + [dice.randrange(3) for _ in range(dice.randint(1, 14))]
            salt = dice.choice(["", "", "tenant"])
            engine.submit(dice.randrange(engine.ranks), prompt, dice.randint(1, 8), salt)
        elif action < 0.35 and engine.open_requests:
            engine.cancel(dice.choice(sorted(engine.open_requests)))
        elif action < 0.75:
            engine.step()
        else:
            try:
                engine.switch()
            except SwitchRefused:
                assert not engine.preempt
            else:
                switches += 1
    engine.run_dry()
    return switches


@settings(max_examples=200, deadline=None)
@given(shapes, st.integers(10, 30), st.booleans(), st.integers(0, 1 << 32))
def test_serving_and_switching_in_any_order(
    shape: tuple[int, int], blocks: int, preempt: bool, seed: int
) -> None:
    ranks, kv_heads = shape
    engine = SwitchableEngine(ranks, head_groups(ranks, kv_heads), blocks, seed=seed, preempt=preempt)
    serve_and_switch(engine, random.Random(seed), actions=30)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(10, 30), st.integers(2, 12), st.integers(0, 1 << 32))
def test_collisions_of_hashes_mix_no_content(
    shape: tuple[int, int], blocks: int, names: int, seed: int
) -> None:
    ranks, kv_heads = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "chain", lambda parent, local: chain(parent, local) % names)
        engine = SwitchableEngine(ranks, head_groups(ranks, kv_heads), blocks, seed=seed, preempt=True)
        serve_and_switch(engine, random.Random(seed), actions=30)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_an_engine_that_switches_between_all_steps_serves_as_one_that_never_does(
    shape: tuple[int, int],
) -> None:
    engine = SwitchableEngine(shape[0], head_groups(*shape), 40)
    for number in range(12):
        engine.submit(number % shape[0], PREFIXES[number % 4] + [number % 3] * 5, 10)
    while engine.origins:
        engine.step()
        engine.switch()
    assert engine.finished == set(range(12))
