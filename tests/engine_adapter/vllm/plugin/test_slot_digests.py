"""Digests of slots while a map's changes are being checked."""

import numpy as np
import torch
from roost_vllm.digests import ExpertHasher, digest_text
from roost_vllm.slot_digests import SlotDigests

from tests.engine_adapter.vllm.plugin.test_rank import CPU, INITIAL, LAYERS, OTHER, SLOTS, identity

LARGE = torch.randn(LAYERS, 4, 400_000)
"""weights that no single slice digests"""
hasher = ExpertHasher(CPU)
EXPECTED = np.array(
    [[int(hasher.digest([LARGE[layer, expert]])) for expert in range(4)] for layer in range(LAYERS)]
)


def texts(table: np.ndarray) -> list[list[str]]:
    """Digests of the slots of rank 0 under a map, by the weights themselves."""
    return [
        [digest_text(int(EXPECTED[layer, expert])) for expert in table[layer, :SLOTS]]
        for layer in range(LAYERS)
    ]


def test_a_slot_that_is_not_checked_yet_has_no_digest_under_the_new_map() -> None:
    def own(table: np.ndarray) -> list[torch.Tensor]:
        return [LARGE[layer][table[layer, :SLOTS].astype(np.int64)] for layer in range(LAYERS)]

    weights = [[layer.clone()] for layer in own(INITIAL)]
    every = np.array([[EXPECTED[layer, expert] for expert in INITIAL[layer]] for layer in range(LAYERS)])
    digests = SlotDigests(identity(0), INITIAL, every, hasher, weights, CPU)
    assert [list(row) for row in digests.told("before").digests] == texts(INITIAL)

    for layer, slots in enumerate(own(OTHER)):
        weights[layer][0].copy_(slots)
    digests.recheck(INITIAL, OTHER)
    changed = INITIAL[:, :SLOTS] != OTHER[:, :SLOTS]
    found, looks = None, 0
    while found is None:
        for layer, row in enumerate(digests.told("after").digests):
            for slot, text in enumerate(row):
                assert text == ("" if changed[layer, slot] else texts(INITIAL)[layer][slot])
        found, looks = digests.advance(OTHER), looks + 1
    assert found == []
    assert looks > 1
    assert [list(row) for row in digests.told("after").digests] == texts(OTHER)
