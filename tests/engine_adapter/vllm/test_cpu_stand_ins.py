"""The stand-in for vLLM's kernel that maps and counts, which the tests with a real vLLM run on the CPU, against
recorded outputs of that kernel."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.vllm.cpu_stand_ins.roost_cpu_stand_ins import map_to_physical_and_record

RECORDED = msgspec.json.decode((Path(__file__).parents[2] / "fleet" / "row_hash_vllm.json").read_bytes())
CASES = pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{len(case['routed'])} rows")


def mapped(case: dict[str, Any], load: torch.Tensor, *, counts: bool, tokens: int | None = None) -> list[Any]:
    """Slots of a case's pairs, [rows, k]. load: to be counted in; tokens: rows that are no padding."""
    holders = [np.flatnonzero(np.array(case["table"]) == expert) for expert in range(case["experts"])]
    slots = torch.full((len(holders), max(map(len, holders)) + 1), -1)
    for expert, held in enumerate(holders):
        slots[expert, : len(held)] = torch.from_numpy(held)
    found = map_to_physical_and_record(
        torch.tensor(case["routed"], dtype=torch.int32),
        load,
        slots,
        torch.tensor([len(held) for held in holders]),
        torch.tensor(counts),
        None if tokens is None else torch.tensor(tokens),
    )
    assert found.dtype == torch.int32
    return found.tolist()


@CASES
def test_pairs_go_where_the_kernel_sends_them_and_are_added_to_the_load(case: dict[str, Any]) -> None:
    load = torch.ones(len(case["table"]), dtype=torch.int32)
    assert mapped(case, load, counts=True) == case["slots"]
    assert (load - 1).tolist() == case["load"]


@CASES
def test_padding_is_mapped_and_not_counted(case: dict[str, Any]) -> None:
    load, tokens = torch.zeros(len(case["table"]), dtype=torch.int32), len(case["routed"]) // 2
    assert mapped(case, load, counts=True, tokens=tokens) == case["slots"]
    real = np.array(case["slots"])[:tokens].ravel().astype(int)
    assert load.tolist() == np.bincount(real, minlength=len(load)).tolist()


@CASES
def test_nothing_is_counted_while_counting_is_off(case: dict[str, Any]) -> None:
    load = torch.zeros(len(case["table"]), dtype=torch.int32)
    assert mapped(case, load, counts=False) == case["slots"]
    assert not load.any()
