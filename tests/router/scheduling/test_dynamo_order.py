"""Order of ranks compared with Dynamo's documented cost, for states that both price alike.

Dynamo's cost, in KV blocks: prefill_load_scale * max(active prefill + incoming prefill - credit, 0) + active
blocks + incoming blocks + decode_active_request_weight * active requests. Ours becomes the same up to a
constant under these conditions: experts, distinct, lockstep and handover have weight 0, pairs of tokens have
no price, all engines are alike, and speeds have this ratio: a prompt token costs scale / block size, O steps
of a running sequence cost its weight, and O steps of a block cost 1.

Remaining differences, with reasons:
- A fully cached prompt: here at least one token is computed, since its logits are needed; there it may count
  0.
- Running requests count here for their expected run time, and fully only if they outlast the new one; there
  their blocks count fully until they end (a decay by expected output length can be switched on).
- Blocks shared by several running requests count once there, and once per request here: bookings are numbers,
  and a rank reports its own count.
- Speeds: blocks cost the same there on every worker. Here they are seconds of each engine, corrected by
  measurements, and an engine's own steps count, too. Equal engines differ in neither.
- Attention over a long prompt is quadratic here if an engine states so; there it is linear.
- Host and disk caches, credits above 1 and their decay, taints: they have no counterpart here.
- Incoming blocks are rounded up there and fractions here; the same for all ranks of one block size.
- Ties are drawn there; here the rank with the least outstanding work comes first, then chance. Temperature is
  relative there, in milliseconds here.
"""

from itertools import pairwise

import numpy as np
import pytest

from fleet.arrays import IntArray
from fleet.timing import EngineSpeed
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS, Reservations
from router.fleet_state.target_table import TargetTable
from router.fleet_state.view import FleetView
from router.scheduling.cost import Weights, score, uncached_tokens
from tests.router.router_fixture import engine_joined

BLOCK, OUTPUT, RANKS = 16, 128, 8
BLOCK_SECONDS = 1e-3
"""Seconds of one of Dynamo's blocks."""
COMMON = Weights.of(experts=0.0, distinct=0.0, lockstep=0.0, handover=0.0)


def roster_of(scale: float, per_request: float) -> TargetTable:
    """Return two engines of four ranks."""
    speed = EngineSpeed(
        prefill_token=scale * BLOCK_SECONDS / BLOCK,
        decode_block=BLOCK_SECONDS / OUTPUT,
        decode_sequence=per_request * BLOCK_SECONDS / OUTPUT,
        step=7e-3,
    )
    view = FleetView(Reservations(settle_seconds=0.1, stale_seconds=5.0))
    for worker in (1, 2):
        urls = [f"http://h:{worker}{rank}" for rank in range(RANKS // 2)]
        view.join(
            engine_joined(f"e{worker}", urls, "f" * 64, worker_id=worker, block_size=BLOCK, speed=speed), 0.0
        )
        view.sign_of_life(worker, 0.0)
    return view.target_table("demo")


@pytest.mark.parametrize(("scale", "per_request"), [(1.0, 0.0), (2.0, 0.0), (4.0, 1.5), (1.0, 8.0)])
def test_the_order_of_ranks_is_dynamos_on_ten_thousand_random_states(
    scale: float, per_request: float
) -> None:
    """2,500 states of eight ranks for each of four settings. Loads, prompts and their cached parts are
    random.
    """
    target_table = roster_of(scale, per_request)
    chance = np.random.default_rng(int(10 * scale + per_request))
    for _ in range(2500):
        prompt = int(chance.integers(1, 20_000))
        load = loads(chance)
        cached = chance.integers(0, (prompt - 1) // BLOCK + 1, RANKS)
        prefill_blocks = np.maximum((load[PREFILL] + prompt) / BLOCK - cached, 0.0)
        theirs = scale * prefill_blocks + load[BLOCKS] + -(-prompt // BLOCK) + per_request * load[SEQUENCES]
        ours = score(
            target_table,
            load,
            uncached_tokens(prompt, cached, target_table.block_size),
            prompt,
            OUTPUT,
            COMMON,
        ).total / (1000.0 * BLOCK_SECONDS)
        assert np.abs((ours - ours.min()) - (theirs - theirs.min())).max() < 1e-6
        for before, after in pairwise(np.argsort(theirs, kind="stable")):
            assert ours[before] < ours[after] or theirs[before] == theirs[after]


def loads(chance: np.random.Generator) -> IntArray:
    """Return random loads. Every running request outlasts the new one, and ranks without any hold no
    blocks."""
    load = np.zeros((AMOUNTS, RANKS), np.int64)
    load[PREFILL] = chance.integers(0, int(chance.choice([2, 500, 60_000])), RANKS)
    load[SEQUENCES] = chance.integers(0, int(chance.choice([3, 200])), RANKS)
    load[BLOCKS] = (load[SEQUENCES] > 0) * chance.integers(1, 8000, RANKS)
    load[STEPS] = load[SEQUENCES] * OUTPUT + chance.integers(0, 9000, RANKS)
    return load


def test_a_prompt_that_is_cached_whole_still_costs_one_token_here() -> None:
    target_table = roster_of(1.0, 0.0)
    cached = np.array([4, 3] * 4)
    ours = score(
        target_table,
        np.zeros((AMOUNTS, RANKS), np.int64),
        uncached_tokens(64, cached, target_table.block_size),
        64,
        OUTPUT,
        COMMON,
    ).total
    assert (ours[1] - ours[0]) / (1000.0 * BLOCK_SECONDS) == pytest.approx((16 - 1) / BLOCK), "there: 16 / 16"


def test_running_requests_that_are_nearly_done_count_less_here() -> None:
    target_table = roster_of(1.0, 0.0)
    load = np.zeros((AMOUNTS, RANKS), np.int64)
    load[SEQUENCES], load[BLOCKS] = 4, 100
    load[STEPS] = [4 * OUTPUT, 4 * OUTPUT // 2] * 4
    ours = score(target_table, load, np.full(RANKS, 10), 10, OUTPUT, COMMON).total
    assert (ours[0] - ours[1]) / (1000.0 * BLOCK_SECONDS) == pytest.approx(50.0), "there both count 100"
