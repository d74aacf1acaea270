"""Maps, demand, digests, counters and the experts of requests."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from roost_vllm.counters import Counters
from roost_vllm.digests import ExpertHasher, SlotCheck, digest_text
from roost_vllm.maps import arrivals, demand_by_expert
from roost_vllm.routed import RoutedRequests, Span, external_id
from roost_vllm.slot_digests import first_digests

CPU = torch.device("cpu")
TABLE = np.array([[0, 1, 2, 0], [2, 1, 0, 1]], np.int16)


def test_demand_by_expert_adds_the_copies() -> None:
    slots = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert demand_by_expert(slots, TABLE, 3).tolist() == [[5, 2, 3], [7, 14, 5]]


def test_only_experts_that_a_rank_did_not_hold_arrive() -> None:
    new = np.array([[1, 0, 2, 0], [0, 1, 2, 1]], np.int16)
    assert [arrivals(TABLE, new, rank=rank, slots=2) for rank in (0, 1)] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_digest_does_not_depend_on_the_pieces_and_sees_every_exchange(dtype: torch.dtype) -> None:
    one = torch.randn(190, 97).mul(20).to(dtype)
    tensors = [one, torch.arange(7, dtype=torch.float32)]
    digest = int(ExpertHasher(CPU).digest(tensors))
    assert int(ExpertHasher(CPU, rows=2).digest(tensors)) == digest
    assert int(ExpertHasher(CPU).digest([one.clone(), tensors[1].clone()])) == digest
    flat = one.flatten()
    for left, right in ((0, 5), (3, len(flat) - 1), (0, 2 * 4096)):
        swapped = flat.clone()
        swapped[[left, right]] = swapped[[right, left]]
        if not torch.equal(swapped, flat):
            assert int(ExpertHasher(CPU).digest([swapped.view_as(one), tensors[1]])) != digest
    assert int(ExpertHasher(CPU).digest(tensors[::-1])) != digest


def test_a_flipped_sign_is_seen_wherever_it_is_and_two_do_not_cancel() -> None:
    one = torch.randn(64, 64)
    hasher = ExpertHasher(CPU)
    seen = {int(hasher.digest([one]))}
    for at in range(0, 64 * 64, 97):
        for pair in ((at,), (at, (at + 1) % 4096)):
            other = one.flatten().clone()
            other[list(pair)] *= -1
            seen.add(int(hasher.digest([other.view(64, 64)])))
    assert len(seen) == 1 + 2 * len(range(0, 64 * 64, 97))


def test_a_check_in_slices_finds_the_same_digests() -> None:
    weights = [[torch.randn(3, 50, 100), torch.randn(3, 9)] for _ in range(2)]
    hasher = ExpertHasher(CPU, rows=1)
    check = SlotCheck(hasher, weights, [(0, 2), (1, 0)], CPU)
    slices = 0
    while not check.is_done:
        check.advance(seconds=1.0, pieces=1)
        slices += 1
    assert slices > 4
    expected = [[tensor[slot] for tensor in weights[layer]] for layer, slot in check.slots]
    assert check.found() == [int(hasher.digest(tensors)) for tensors in expected]


def test_copies_that_differ_at_the_start_are_found() -> None:
    digests = np.array([[10, 11, 12, 10], [7, 8, 9, 80]])
    known, mismatches = first_digests(TABLE, digests, experts=3)
    assert known[0] == [digest_text(value) for value in (10, 11, 12)]
    assert [(one.layer, one.slot, one.expert, one.found) for one in mismatches] == [
        (1, 3, 1, digest_text(80))
    ]


def test_counters_sum_the_steps_and_know_the_balance_when_they_see_all_tokens() -> None:
    counters = Counters(2, 4, 2, CPU, sees_all=True)
    for load in ([[1, 1, 3, 3], [0, 4, 0, 0]], [[2, 0, 1, 1], [1, 1, 1, 1]]):
        counters.begin_step()
        counters.add(torch.tensor(load, dtype=torch.int32))
    counters.launch()
    counts = counters.land()
    assert counts is not None
    assert counts.slots.tolist() == [[3, 1, 4, 4], [1, 5, 1, 1]]
    assert counts.balance == pytest.approx([4 / 6 + 1, 0.5 + 1])
    assert counts.steps == 2
    assert counts.seconds > 0
    assert counters.land() is None


def test_counters_are_told_once() -> None:
    counters = Counters(1, 2, 2, CPU, sees_all=False)
    counters.add(torch.ones(1, 2, dtype=torch.int32))
    counters.launch()
    counters.add(torch.ones(1, 2, dtype=torch.int32))
    first = counters.land()
    counters.launch()
    second = counters.land()
    assert first is not None
    assert second is not None
    assert (first.slots.sum(), second.slots.sum(), len(first.balance)) == (2, 2, 0)


@pytest.mark.parametrize(
    ("internal", "external"),
    [
        ("chatcmpl-abc-0a1b2c3d", "chatcmpl-abc"),
        ("cmpl-abc-0-0a1b2c3d", "cmpl-abc-0"),
        ("1_chatcmpl-abc-0a1b2c3d", "chatcmpl-abc"),
        ("plain", "plain"),
    ],
)
def test_a_request_is_named_as_the_front_end_names_it(internal: str, external: str) -> None:
    assert external_id(internal) == external


def rows(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int16)[:, None, None].repeat(2, 1)


def test_experts_of_a_request_are_put_together_from_its_steps() -> None:
    requests = RoutedRequests()
    requests.begin("cmpl-a-0-00000000", 6)
    requests.begin("cmpl-b-0-00000000", 3)
    requests.add(
        [Span("cmpl-b-0-00000000", 0, 3), Span("cmpl-a-0-00000000", 2, 4)],
        np.concatenate([rows(0, 3), rows(2, 4)]),
    )
    requests.add([Span("cmpl-a-0-00000000", 6, 1)], rows(6, 1))
    (report,) = requests.end(["cmpl-a-0-00000000", "unknown"])
    assert (report.request, report.first, report.positions, report.top_k) == ("cmpl-a-0", 2, 5, 1)
    assert np.frombuffer(report.experts, "<i2").tolist() == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert requests.end(["cmpl-a-0-00000000"]) == []


def test_the_agents_own_requests_are_not_told() -> None:
    requests = RoutedRequests()
    requests.begin("cmpl-roost-nudge-7-0-00000000", 6)
    requests.add([Span("cmpl-roost-nudge-7-0-00000000", 0, 3)], rows(0, 3))
    assert requests.end(["cmpl-roost-nudge-7-0-00000000"]) == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=8))
def test_a_report_covers_one_range_and_has_the_newest_rows(spans: list[tuple[int, int]]) -> None:
    requests = RoutedRequests()
    requests.begin("a", 1)
    newest: dict[int, int] = {}
    for step, (first, count) in enumerate(spans):
        requests.add([Span("a", first, count)], np.full((count, 1, 1), step, np.int16))
        newest = {at: then for at, then in newest.items() if at < first} | dict.fromkeys(
            range(first, first + count), step
        )
    (report,) = requests.end(["a"])
    told = np.frombuffer(report.experts, "<i2").tolist()
    assert told == [newest[at] for at in range(report.first, report.first + report.positions)]
    last, count = spans[-1]
    assert report.first + report.positions == last + count
