"""Step times of a simulated engine in the layouts that it can serve, by its time model. Pure NumPy."""

import numpy as np

from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.dispatch_model import DispatchModel
from engine_adapter.simulated.model.routing_model import RoutingModel
from engine_adapter.simulated.model.step_time import StepPlan, seconds
from fleet.blocks import BLOCK_SIZE
from fleet.layout_times import LayoutName, LayoutTimes
from fleet.placement import Placement, linear, with_rows
from fleet.timing import surplus_pairs

_BATCHES = 6
_CONTEXTS = (64, 1024, 8192)
_DRAWS = 8
"""Steps of each kind, with other tokens."""
_SEED = 1


def layout_times(
    config: SimulatedConfig, routing: RoutingModel, placement: Placement
) -> tuple[LayoutTimes, ...]:
    """Return the times, in real seconds, of EP and of EXPERTS_TP. Empty for an engine that cannot change
    between them. placement: that it starts with, whose whole layers keep their experts."""
    if config.ranks == 1 or config.unshardable:
        return ()
    in_order = linear(
        layers=placement.layers,
        experts=placement.experts,
        ranks=placement.ranks,
        slots_per_rank=placement.slots_per_rank,
    )
    rows = {layer: in_order.expert_of_slot[layer] for layer in placement.sharded}
    whole = with_rows(placement, rows, epoch=placement.epoch)
    sharded = with_rows(placement, dict.fromkeys(range(placement.layers)), epoch=placement.epoch)
    return _times("ep", config, routing, whole), _times("experts-tp", config, routing, sharded)


def _times(
    name: LayoutName, config: SimulatedConfig, routing: RoutingModel, placement: Placement
) -> LayoutTimes:
    routes = DispatchModel(routing, placement, config.node_of_rank, cover=config.covers)
    most = config.ranks * min(config.max_running, config.kv_blocks)
    counts = sorted({round(most ** (at / (_BATCHES - 1))) for at in range(_BATCHES)})
    # As many sequences as a rank runs have room in its KV blocks.
    room = min(config.context, config.kv_blocks * config.ranks // most * BLOCK_SIZE)
    contexts = sorted({min(context, room) for context in _CONTEXTS})
    dice = np.random.default_rng(_SEED)

    def step(tokens: int, prompt_tokens: int, context: int) -> tuple[float, float]:
        """Return mean seconds and surplus of steps with these decoding sequences, or with prompt tokens. Each
        is of the engine."""
        found = np.zeros(2)
        for _ in range(_DRAWS):
            drawn = dice.integers(routing.rows, size=tokens + prompt_tokens)
            by_row = np.zeros((config.ranks, routing.rows), np.int64)
            np.add.at(by_row, (np.arange(len(drawn)) % config.ranks, drawn), 1)
            caused = routes.traffic(by_row)
            plans = []
            for own in by_row.sum(axis=1).tolist():
                decodes = 0 if prompt_tokens else own
                blocks = decodes * -(-context // BLOCK_SIZE)
                pairs = 0 if decodes else own * (own + 1) / 2
                plans.append(StepPlan([], own - decodes, pairs, decodes, blocks))
            found += seconds(config.speed, plans, caused).max(), surplus_pairs(caused.served)
        lasted, surplus = (found / _DRAWS).tolist()
        return config.time_scale * lasted, surplus

    steps = [[step(count, 0, context) for count in counts] for context in contexts]
    full = config.ranks * min(config.max_batch_tokens, config.context)
    return LayoutTimes(
        layout=name,
        sequences=tuple(counts),
        contexts=tuple(contexts),
        seconds=tuple(tuple(lasted for lasted, _ in row) for row in steps),
        noise=0.0,
        prefill_token=step(0, full, 0)[0] / full,
        surplus=sum(surplus for row in steps for _, surplus in row) / (len(contexts) * sum(counts)),
    )
