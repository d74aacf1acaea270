"""Files of other systems: read as written, or refused with an explanation."""

import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tracker.importers.load_files import MAX_BYTES, ExpertLoads, by_logical_expert, read_load
from tracker.importers.torch_files import read_torch_file

CHANCE = np.random.default_rng(0)
COUNTS = CHANCE.integers(1, 100, (3, 4, 8))
"""[steps, layers, experts]"""
TOTAL = COUNTS.sum(axis=0)
MAP = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 3],
        [7, 6, 5, 4, 3, 2, 1, 0, 7, 7],
        [0, 1, 2, 3, 4, 5, 6, 7, -1, -1],
        [1, 0, 2, 3, 4, 5, 6, 7, 2, 1],
    ]
)
"""[layers, slots]; -1: empty"""


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def npy(table: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, table)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def by_hand(slots: np.ndarray) -> np.ndarray:
    """Count by logical expert, slot by slot."""
    logical = np.zeros((4, 8))
    for layer in range(4):
        for slot in range(10):
            if MAP[layer, slot] >= 0:
                logical[layer, MAP[layer, slot]] += slots[layer, slot]
    return logical


def recording(mode: str) -> tuple[dict[str, Any], np.ndarray]:
    """Return a recording as SGLang's recorder saves it in a mode, and its counts."""
    if mode == "stat":
        return {
            "rank": 0,
            "logical_count": torch.tensor(COUNTS, dtype=torch.int32),
            "average_utilization_rate_over_window": None,
        }, TOTAL
    records, total = [], np.zeros((4, 8))
    for number in range(3):
        slots = np.where(MAP >= 0, CHANCE.integers(0, 50, MAP.shape), 0)
        total += by_hand(slots)
        record = {
            "forward_pass_id": number,
            "rank": 0,
            "gatherer_key": "primary",
            "global_physical_count": torch.tensor(slots, dtype=torch.int32),
        }
        if mode == "per_token":
            chosen = np.full((4, 5, 8), -1)
            chosen[:, :, :2] = CHANCE.integers(0, 8, (4, 5, 2))
            detail = {
                "input_ids": [1, 2, 3, 4, 5],
                "positions": [0, 1, 2, 3, 4],
                "extend_seq_lens": [5],
                "forward_mode": 1,
                "misc_objects": [],
            }
            record |= {**detail, "topk_ids_of_layer": torch.tensor(chosen, dtype=torch.int32)}
        records.append(record)
    return {"records": records, "last_physical_to_logical_map": torch.tensor(MAP)}, total


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_a_recording_of_sglang_is_read_whatever_its_mode(mode: str) -> None:
    content, total = recording(mode)
    load = read_load(f"expert_distribution_recorder_17{mode}.pt", saved(content))
    np.testing.assert_array_equal(load.counts, total)
    assert (load.steps, load.is_counts, load.top_k, load.empty_layers) == (
        3,
        True,
        2 if mode == "per_token" else None,
        0,
    )
    assert "SGLang" in load.form


def test_dense_layers_which_such_systems_number_too_are_left_out() -> None:
    counts = np.concatenate([np.zeros((3, 8), np.int64), TOTAL])
    load = read_load("load.npy", npy(counts))
    np.testing.assert_array_equal(load.counts, TOTAL)
    assert load.empty_layers == 3


@pytest.mark.parametrize("shape", ["layers", "steps"])
@pytest.mark.parametrize("ending", ["npy", "npz", "json"])
def test_a_load_matrix_is_read_with_or_without_steps(ending: str, shape: str) -> None:
    table = TOTAL if shape == "layers" else COUNTS
    content = {
        "npy": npy(table),
        "npz": npz(weight=table, other=np.arange(3)),
        "json": json.dumps({"logical_count": table.tolist()}).encode(),
    }[ending]
    load = read_load(f"LOAD.{ending.upper()}", content)
    np.testing.assert_array_equal(load.counts, TOTAL)
    assert load.steps == (1 if shape == "layers" else 3)


def test_a_bare_json_list_and_a_lonely_array_need_no_name() -> None:
    np.testing.assert_array_equal(read_load("a.json", json.dumps(TOTAL.tolist()).encode()).counts, TOTAL)
    np.testing.assert_array_equal(read_load("a.npz", npz(whatever=TOTAL)).counts, TOTAL)
    np.testing.assert_array_equal(read_load("a.pt", saved(torch.tensor(TOTAL))).counts, TOTAL)


@pytest.mark.parametrize(
    "head", ["", "layer," + ",".join(f"e{expert}" for expert in range(8)) + "\n", ",".join("abcdefgh") + "\n"]
)
def test_a_csv_has_a_line_per_layer(head: str) -> None:
    numbered = head.startswith("layer")
    lines = [
        ",".join(map(str, ([layer] if numbered else []) + row)) for layer, row in enumerate(TOTAL.tolist())
    ]
    np.testing.assert_array_equal(
        read_load("a.csv", (head + "\n".join(lines) + "\n\n").encode()).counts, TOTAL
    )


def test_slots_are_counted_as_the_experts_that_are_in_them() -> None:
    slots = CHANCE.integers(0, 50, MAP.shape)
    np.testing.assert_array_equal(by_logical_expert(slots.astype(float), MAP), by_hand(slots))
    for content, name in (
        (npz(load=slots, physical_to_logical_map=MAP), "a.npz"),
        (json.dumps({"load": slots.tolist(), "physical_to_logical_map": MAP.tolist()}).encode(), "a.json"),
    ):
        np.testing.assert_array_equal(read_load(name, content).counts, by_hand(slots))


def test_proportions_need_to_be_told_how_many_tokens_they_stand_for() -> None:
    shares = TOTAL / TOTAL.sum(axis=1, keepdims=True)
    load = read_load("a.npy", npy(shares))
    assert not load.is_counts
    with pytest.raises(ValueError, match="how many tokens"):
        load.pairs(top_k=2)
    tokens, counts = load.pairs(top_k=2, tokens=100_000)
    assert tokens == 100_000
    np.testing.assert_allclose(counts, shares * 200_000, atol=0.5)
    tokens, counts = read_load("a.npy", npy(TOTAL)).pairs(top_k=2)
    assert tokens == round(TOTAL.sum(axis=1).max() / 2)
    np.testing.assert_array_equal(counts, TOTAL)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "a name that ends in .pt"),
        ("a.pt", b"\x80\x02}q\x00.", "torch 1.6"),
        ("a.pt", b"PK\x03\x04 nothing", "damaged"),
        ("a.pt", saved([1, 2]), "a list was saved"),
        ("a.pt", saved({"records": []}), "without any forward pass"),
        ("a.pt", saved({"records": [{"rank": 0}]}), "record 0 has no global_physical_count"),
        (
            "a.pt",
            saved({"rank": 0, "model": torch.zeros(2)}),
            "it names model, rank; expected one of logical_count",
        ),
        ("a.pt", saved({"logical_count": torch.zeros(2, 4, 8)}), "all zeros"),
        ("a.npy", b"", "not a .npy array"),
        ("a.npy", npz(weight=TOTAL), "name it .npz"),
        ("a.npy", npy(np.array(["text"])), "expected numbers"),
        ("a.npy", npy(np.arange(3)), r"shape \(3,\); expected \[layers, experts\]"),
        ("a.npy", npy(np.array([[1.0, -1.0]])), "negative or not finite"),
        ("a.npy", npy(np.array([[1.0, np.nan]])), "negative or not finite"),
        ("a.npz", b"PK", "not a .npz archive"),
        ("a.npz", npz(a=TOTAL, b=TOTAL), "it names a, b; expected one of logical_count"),
        ("a.npz", npz(load=TOTAL, physical_to_logical_map=MAP), "expected integers of the counts' shape"),
        ("a.json", b"{", "not JSON"),
        ("a.json", b'{"load": [[1, 2], [3]]}', "rows differ in length"),
        ("a.json", b'{"load": [["a"]]}', "holds text"),
        ("a.json", b'{"load": null}', "expected a table of numbers"),
        ("a.csv", b"", "empty file"),
        ("a.csv", b"\xff\xfe", "not text"),
        ("a.csv", b"1,2\n3\n", "line 2 has 1 columns; expected 2 numbers"),
        ("a.csv", b"a,b\n1,x\n", "line 2 has 2 columns"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_was_found_and_what_is_expected(
    name: str, content: bytes, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        read_load(name, content)
    assert str(refused.value).startswith(name)


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


def test_a_pickle_that_wants_to_run_something_is_refused_and_nothing_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"logical_count": _Evil()}))
    with pytest.raises(ValueError, match=r"it names .*print"):
        read_load("a.pt", out.getvalue())
    with pytest.raises(ValueError, match=r"not a \.npy array"):
        read_load("a.npy", npy(np.array([_Evil()], dtype=object)))
    assert "it ran" not in capsys.readouterr().out


def test_a_tensor_cannot_reach_outside_its_storage() -> None:
    content = saved({"logical_count": torch.ones(2, 2, 3)})
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    pickled = next(name for name in entries if name.endswith("data.pkl"))
    for found, forged in (
        (b"K\x02K\x02K\x03\x87", b"K\x02K\x02K\x7f\x87"),
        (b"K\x06K\x03K\x01\x87", b"K\x7fK\x03K\x01\x87"),
        (b"K\x0ctq", b"K\x0btq"),
    ):
        assert entries[pickled].count(found) == 1
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, entry in entries.items():
                archive.writestr(name, entry.replace(found, forged) if name == pickled else entry)
        with pytest.raises(ValueError, match=r"reaches to|numbers; "):
            read_load("a.pt", out.getvalue())


@given(
    npst.arrays(
        st.sampled_from(["u1", "i1", "i2", "i4", "i8", "f4", "f8"]), npst.array_shapes(max_dims=4, max_side=5)
    ),
    st.booleans(),
)
def test_tensors_are_read_as_torch_reads_them(table: np.ndarray, turned: bool) -> None:
    tensor = torch.tensor(table)
    tensor = tensor.transpose(0, -1) if turned else tensor
    content = saved(
        {"a": [tensor, tensor[1:] if len(tensor) else tensor], "b": None, "c": "text", "d": (1, 2.5)}
    )
    read, expected = read_torch_file(content), torch.load(io.BytesIO(content), weights_only=True)
    assert (read["b"], read["c"], read["d"]) == (None, "text", (1, 2.5))
    for ours, theirs in zip(read["a"], expected["a"], strict=True):
        assert ours.dtype == theirs.numpy().dtype
        np.testing.assert_array_equal(ours, theirs.numpy())


@given(st.binary(max_size=200), st.sampled_from(["a.pt", "a.npy", "a.npz", "a.json", "a.csv"]), st.booleans())
def test_garbage_is_refused_and_never_anything_else(content: bytes, name: str, begun: bool) -> None:
    is_counts = {
        "a.pt": saved({"logical_count": torch.ones(1, 1, 1)}),
        "a.npz": npz(load=np.ones((1, 1))),
    }.get(name, b"")
    try:
        load = read_load(name, is_counts[: len(is_counts) // 2] + content if begun else content)
    except ValueError:
        return
    assert isinstance(load, ExpertLoads)
    assert load.counts.ndim == 2


def test_a_file_that_is_too_large_is_not_parsed() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_BYTES + 1

    with pytest.raises(ValueError, match="Dump shorter recordings"):
        read_load("a.npy", Huge())
