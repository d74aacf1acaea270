"""What the recorder in vLLM's workers writes is read as balance, received experts and remote pairs."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.rig.vllm.recorder.roost_recorder import Recorder  # noqa: E402
from benchmarks.rig.vllm.records import balance, balances, read, received, remote  # noqa: E402

INITIAL = [[0, 1, 2, 3], [0, 1, 2, 3]]
"""two layers, two ranks of two slots, four experts"""
SWAPPED = [[0, 2, 1, 3], [0, 1, 2, 3]]
TURNED = [[1, 0, 2, 3], [0, 1, 2, 3]]


def recorded(
    folder: Path, *steps: tuple[list[list[int]], list[list[int]] | None, list[list[int]] | None]
) -> None:
    """Write (map, pairs of rank 0, pairs of rank 1) of each step; None: a step without tokens of the rank."""
    for rank in (0, 1):
        recorder = Recorder(folder, rank, 2, 2, 4, 4)
        for expert_of_slot, *pairs in steps:
            table = torch.tensor(pairs[rank] or np.full((2, 4), 9).tolist())
            recorder.step(pairs[rank] is None, table, torch.tensor(expert_of_slot))
        recorder.close()


def test_the_load_of_a_step_is_the_sum_over_the_ranks_that_counted(tmp_path: Path) -> None:
    recorded(tmp_path, (INITIAL, [[3, 0, 0, 1], [1, 1, 1, 1]], [[0, 0, 2, 0], [0, 0, 0, 4]]))
    # layer 0: ranks have 3 and 3; layer 1: 2 and 6
    assert balances(read(tmp_path)).tolist() == [[1.0, 4 / 6]]


def test_steps_without_tokens_of_a_rank_count_nothing(tmp_path: Path) -> None:
    recorded(tmp_path, (INITIAL, [[2, 0, 0, 0], [0, 0, 1, 1]], None), (INITIAL, None, None))
    record = read(tmp_path)
    assert record.busy.tolist() == [True, False]
    assert balance(record) == 0.5


def test_an_expert_is_received_by_a_rank_that_did_not_hold_it(tmp_path: Path) -> None:
    some = [[1, 1, 1, 1]] * 2
    recorded(tmp_path, (INITIAL, some, some), (SWAPPED, some, some), (TURNED, some, some))
    record = read(tmp_path)
    assert [change.step for change in record.changes] == [0, 1, 2]
    assert received(record) == [2, 2]


def test_copies_within_a_rank_are_no_reception(tmp_path: Path) -> None:
    some = [[1, 1, 1, 1]] * 2
    recorded(tmp_path, (INITIAL, some, some), (TURNED, some, some))
    assert received(read(tmp_path)) == [0]


def test_pairs_are_remote_when_the_slot_is_not_on_the_rank_of_the_token(tmp_path: Path) -> None:
    recorded(tmp_path, (INITIAL, [[3, 1, 0, 0], [0, 0, 4, 0]], [[0, 0, 4, 4], [2, 0, 0, 2]]))
    # of rank 0: 4 of 8 leave it; of rank 1: 2 of 12
    assert remote(read(tmp_path)) == pytest.approx(6 / 20)


def test_a_part_of_a_record_begins_with_the_map_in_force(tmp_path: Path) -> None:
    some = [[1, 1, 1, 1]] * 2
    recorded(tmp_path, *[(one, some, some) for one in (INITIAL, SWAPPED, SWAPPED, INITIAL, TURNED)])
    record = read(tmp_path)
    part = record.between(float(record.seconds[2]), float(record.seconds[4]))
    assert [change.step for change in part.changes] == [0, 1]
    assert part.changes[0].expert_of_slot.tolist() == SWAPPED
    assert (len(part.busy), received(part)) == (2, [2])


def test_ranks_that_disagree_about_the_map_are_reported(tmp_path: Path) -> None:
    some = [[1, 1, 1, 1]] * 2
    recorded(tmp_path, (INITIAL, some, some), (INITIAL, some, some))
    other = Recorder(tmp_path, 1, 2, 2, 4, 4)
    for expert_of_slot in (INITIAL, SWAPPED):
        other.step(False, torch.tensor(some), torch.tensor(expert_of_slot))
    other.close()
    with pytest.raises(ValueError, match="different maps"):
        read(tmp_path)


def test_a_missing_rank_is_reported(tmp_path: Path) -> None:
    Recorder(tmp_path, 0, 2, 2, 4, 4).close()
    with pytest.raises(ValueError, match="records of 1 ranks"):
        read(tmp_path)
