"""Few moves by samples against vLLM's own policy (EPLB) on the same steps: at least its balance, at most a
fifth of its moved experts. A pure simulation; `benchmarks/real_vllm/loop.py` measures a real vLLM.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from migration.solvers.eplb import eplb_global
from migration.solvers.full_tables import arrivals
from migration.solvers.sampled_moves import sampled_moves

LAYERS, EXPERTS, TOP_K, RANKS, SLOTS = 4, 32, 4, 2, 40
RUNNING, LENGTH, STEPS, REPORT = 8, 130, 6000, 15
"""Requests at a time, steps of a request, steps of the run, and steps of a report. Half of the run is of one
domain, half of another."""
Steps = NDArray[np.float64]
"""[steps, layers, experts]: pairs"""
Policy = Callable[[int, SlotTable, Steps], SlotTable | None]
"""(step, map in force, steps so far) -> new map; None: it stays"""


def steps(seed: int) -> Steps:
    """Pairs of every step: of the requests that run, each a text with experts of its own."""
    dice = np.random.default_rng(seed)
    found = np.zeros((STEPS, LAYERS, EXPERTS))
    for domain in range(2):
        common = dice.dirichlet(np.full(EXPERTS, 0.5), LAYERS)
        texts = np.stack([dice.dirichlet(np.full(EXPERTS, 0.3), LAYERS) for _ in range(5)])
        begin = domain * STEPS // 2
        for _ in range(RUNNING):
            at = begin - int(dice.integers(LENGTH))
            while at < begin + STEPS // 2:
                profile = 0.5 * common + 0.5 * texts[dice.integers(len(texts))]
                until = min(at + LENGTH, begin + STEPS // 2)
                for layer in range(LAYERS):
                    part = slice(max(at, begin), until)
                    found[part, layer] += dice.multinomial(TOP_K, profile[layer], part.stop - part.start)
                at = until
    return found


def as_vllm_starts() -> SlotTable:
    return np.tile(np.arange(SLOTS) % EXPERTS, (LAYERS, 1)).astype(np.int16)


def balance(table: SlotTable, pairs: Steps) -> NDArray[np.float64]:
    """Mean / highest load of a rank with replicas at even shares, [steps, layers]."""
    loads = np.zeros((len(pairs), LAYERS, RANKS))
    for layer, row in enumerate(table):
        each = pairs[:, layer] / np.bincount(row, minlength=EXPERTS)
        for rank, held in enumerate(row.reshape(RANKS, -1)):
            loads[:, layer, rank] = each[:, held].sum(axis=1)
    return np.asarray(loads.mean(axis=2) / loads.max(axis=2))


def run(pairs: Steps, changes: list[int], policy: Policy) -> tuple[float, int]:
    """Return the mean balance after the first change, and the experts received in all."""
    table, received, found = as_vllm_starts(), 0, []
    for begin, end in zip(changes, [*changes[1:], STEPS], strict=True):
        new = policy(begin, table, pairs[:begin])
        if new is not None:
            received += int(arrivals(table, new, RANKS).sum())
            table = new
        found.append(balance(table, pairs[begin:end]))
    return float(np.concatenate(found).mean()), received


def eplb(begin: int, table: SlotTable, before: Steps) -> SlotTable:
    """Map the load of the last 300 steps anew, as vLLM does."""
    return eplb_global(before[-300:].sum(axis=0), SLOTS, RANKS).astype(np.int16)


def few_moves(begin: int, table: SlotTable, before: Steps) -> SlotTable:
    """Plan from the reports of the last 600 steps."""
    reports = before[-600:].reshape(-1, REPORT, LAYERS, EXPERTS).sum(axis=1)
    return sampled_moves(table, reports, RANKS, least=0.05 / SLOTS)


def test_few_moves_reach_eplbs_balance_at_a_fifth_of_its_moved_experts() -> None:
    """Both change the map every 600 steps. The texts differ from seed to seed, so balance is a mean."""
    instants, better, start = [*range(600, STEPS, 600)], [], []
    for seed in range(3):
        pairs = steps(seed)
        theirs, ours = run(pairs, instants, eplb), run(pairs, instants, few_moves)
        assert ours[1] <= theirs[1] / 5
        better.append(ours[0] - theirs[0])
        start.append(ours[0] - float(balance(as_vllm_starts(), pairs[600:]).mean()))
    assert np.mean(better) >= 0.0
    assert min(better) > -0.002
    assert min(start) > 0.005
