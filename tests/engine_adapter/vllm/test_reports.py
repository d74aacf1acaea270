"""Reports of the plugin as facts of targets, against what a made-up engine really did."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.vllm.reports import DemandSplit, MoveTimes, decision_of, ended_request, engine_shape
from engine_adapter.vllm.wire import MapMoved, RoutedRequest, WorkerDemand, WorkerHello
from fleet.routings import UNKNOWN

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def hello(ranks: int = 2, targets: int = 2, **about: Any) -> WorkerHello:
    known: dict[str, Any] = {
        "protocol": 1,
        "proof": b"",
        "nonce": b"",
        "plugin": "p",
        "engine": "e",
        "instance": "i",
        "pid": 1,
        "rank": 0,
        "ranks": ranks,
        "target": 0,
        "targets": targets,
        "model": "m",
        "layers": LAYERS,
        "experts": EXPERTS,
        "slots": 3,
        "top_k": TOP_K,
        "expert_bytes": 1200,
        "all2all": "allgather_reducescatter",
        "dtype": "float32",
        "map": b"",
    }
    return WorkerHello(**known | about)


def report(demand: Any, slots: Any, tokens: int, steps: int = 5, **about: Any) -> WorkerDemand:
    return WorkerDemand(
        served="d",
        steps=steps,
        seconds=0.5,
        tokens=tokens,
        demand=b"" if demand is None else np.asarray(demand, "<i8").tobytes(),
        slots=b"" if slots is None else np.asarray(slots, "<i8").tobytes(),
        **about,
    )


# Shape


def test_the_shape_has_the_bytes_of_an_expert() -> None:
    for about in ({}, {"dtype": "bfloat16"}, {"dtype": "int4"}, {"quantisation": "fp8"}):
        found = engine_shape(hello(**about))
        assert 1200 <= found.shape.expert_bytes < 1200 + 12
        assert (found.shape.layers, found.shape.experts, found.shape.top_k) == (LAYERS, EXPERTS, TOP_K)


@pytest.mark.parametrize(
    ("ranks", "targets", "all2all", "expected"),
    [
        (2, 2, "allgather_reducescatter", ("dp", True)),
        (2, 2, "naive", ("dp", True)),
        (2, 2, "deepep_low_latency", ("dp", False)),
        (2, 1, "deepep_low_latency", ("tp", True)),  # one target: its tokens are on every rank
        (4, 2, "nixl_ep", ("dp", False)),
        (1, 1, "naive", ("dp", True)),
    ],
)
def test_layout_and_backend(ranks: int, targets: int, all2all: str, expected: tuple[Any, bool]) -> None:
    said = hello(ranks, targets, all2all=all2all)
    assert (said.attention, engine_shape(said).gathers_all) == expected


# Demand


@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 2), (2, 1), (4, 2)]))
def test_targets_get_their_demand_and_ranks_serve_what_was_sent(seed: int, width: tuple[int, int]) -> None:
    """Every target reports twice, in any order: what is served and what is demanded add up to the same."""
    random = np.random.default_rng(seed)
    ranks, targets = width
    split, per = DemandSplit(hello(ranks, targets)), ranks // targets
    sent = np.zeros((targets, LAYERS, ranks))
    facts: dict[int, list[Any]] = {target: [] for target in range(targets)}
    order = list(random.permutation(np.repeat(np.arange(targets), 2)))
    for target in order + list(range(targets)):  # a last report of each takes what others have sent meanwhile
        slots = random.integers(0, 9, (LAYERS, ranks, 3))
        slots[:, :, 0] += 20 - slots.sum(axis=(1, 2), keepdims=True)[:, :, 0] // ranks
        slots *= 2
        pairs = slots.sum(axis=(1, 2))
        slots[0, 0, 0] += pairs.max() - pairs[0]
        slots[1, 0, 0] += pairs.max() - pairs[1]
        tokens = int(slots.sum(axis=(1, 2))[0]) // TOP_K
        sent[target] += slots.sum(axis=2)
        activations, dispatch = split.add(target * per, report(np.ones((LAYERS, EXPERTS)), slots, tokens), 3)
        assert activations is not None
        assert dispatch is not None
        assert dispatch.pairs == tokens * TOP_K
        assert (dispatch.local <= dispatch.pairs).all()
        assert (dispatch.remote_ranks == tokens * (ranks - per)).all()
        assert ((dispatch.balance > 0) & (dispatch.balance <= dispatch.steps + 1e-9)).all()
        facts[target].append(dispatch)
    for target in range(targets):
        own = range(target * per, (target + 1) * per)
        assert np.allclose(sum(one.local for one in facts[target]), sent[target][:, own].sum(axis=1))
    served = sum(one.served for found in facts.values() for one in found)
    left = sent.sum(axis=(0, 2)) - served
    assert (left >= 0).all()  # of the last reports, what others serve is not yet told


def test_a_rank_whose_tokens_another_counts_reports_nothing_of_its_own() -> None:
    assert DemandSplit(hello(2, 1)).add(1, report(None, np.ones((LAYERS, 2, 3)), 7), 1) == (None, None)


def test_the_balance_of_the_plugin_counts() -> None:
    slots = np.zeros((LAYERS, 2, 3))
    slots[:, 0, 0] = 10
    told = report(np.ones((LAYERS, EXPERTS)), slots, 5, balance=np.array([2.0, 3.0], "<f8").tobytes())
    guessed = report(np.ones((LAYERS, EXPERTS)), slots, 5)
    first, second = (DemandSplit(hello()).add(0, one, 1)[1] for one in (told, guessed))
    assert first is not None
    assert second is not None
    assert first.balance.tolist() == [2.0, 3.0]
    assert second.balance.tolist() == [2.5, 2.5]  # all on one of two ranks, in each of 5 steps


def test_tokens_reach_fewer_ranks_where_they_are_sent_only_to_their_experts() -> None:
    slots = np.zeros((LAYERS, 2, 3))
    slots[:, 0, 0], slots[0, 1, 0] = 50, 50
    _, dispatch = DemandSplit(hello(all2all="nixl_ep")).add(
        0, report(np.ones((LAYERS, EXPERTS)), slots, 50), 1
    )
    assert dispatch is not None
    assert dispatch.remote_ranks.tolist() == [50 * 0.75, 0.0]


@pytest.mark.parametrize(
    "bad",
    [
        report(np.ones((LAYERS, EXPERTS + 1)), None, 1),
        report(-np.ones((LAYERS, EXPERTS)), None, 1),
        report(np.ones((LAYERS, EXPERTS)), np.ones((LAYERS, 2, 4)), 1),
        report(np.ones((LAYERS, EXPERTS)), np.ones((LAYERS, 2, 3)), 1, balance=b"x"),
        report(np.ones((LAYERS, EXPERTS)), None, -1),
    ],
)
def test_reports_of_other_shapes_are_refused(bad: WorkerDemand) -> None:
    with pytest.raises(ValueError, match=r"bytes, expected|negative"):
        DemandSplit(hello()).add(0, bad, 1)


# Requests


@pytest.mark.parametrize(
    ("request_id", "decision"),
    [
        ("chatcmpl-2eff768cce2281139a3c", "2eff768cce2281139a3c"),
        ("chatcmpl-2eff768cce2281139a3c-a2", "2eff768cce2281139a3c-a2"),
        ("cmpl-2eff768cce2281139a3c-0", "2eff768cce2281139a3c"),
        ("cmpl-2eff768cce2281139a3c-a2-0", "2eff768cce2281139a3c-a2"),
        ("1_chatcmpl-2eff768cce2281139a3c", "2eff768cce2281139a3c"),
        ("2eff768cce2281139a3c", "2eff768cce2281139a3c"),
    ],
)
def test_the_decision_id_is_in_vllms_request_id(request_id: str, decision: str) -> None:
    assert decision_of(request_id) == decision


def test_cached_positions_are_unknown() -> None:
    chosen = np.arange(3 * LAYERS * TOP_K, dtype="<i2").reshape(3, LAYERS, TOP_K)
    message = RoutedRequest(
        request="cmpl-a-0", prompt_tokens=4, first=2, positions=3, top_k=TOP_K, experts=chosen.tobytes()
    )
    ended = ended_request(message, hello(experts=64))
    assert ended is not None
    assert (ended.decision, ended.prompt_tokens) == ("a", 4)
    assert (ended.routed[:2] == UNKNOWN).all()
    assert (ended.routed[2:] == chosen).all()


def test_requests_of_the_agents_own_are_left_out() -> None:
    message = RoutedRequest(
        request="cmpl-roost-nudge-1f-0", prompt_tokens=1, first=0, positions=0, top_k=1, experts=b""
    )
    assert ended_request(message, hello(experts=64)) is None


@pytest.mark.parametrize(
    "about",
    [
        {"experts": b"x"},
        {"positions": -1},
        {"first": -1},
        {"first": 1 << 40},
        {"top_k": 3},
        {"positions": 1, "experts": b"\x04\x00" * (LAYERS * TOP_K)},
        {"positions": 1, "experts": b"\xff\xff" * (LAYERS * TOP_K)},
    ],
)
def test_requests_that_contradict_themselves_are_refused(about: dict[str, Any]) -> None:
    known: dict[str, Any] = {
        "request": "a",
        "prompt_tokens": 1,
        "first": 0,
        "positions": 0,
        "top_k": TOP_K,
        "experts": b"",
    }
    with pytest.raises(ValueError, match=r"experts|first routed position"):
        ended_request(RoutedRequest(**known | about), hello())


# Moves


def test_a_move_is_timed_once_by_all_ranks() -> None:
    old = np.array([[0, 1, 2, 2, 3, 0], [0, 1, 2, 2, 3, 0]], np.int16)
    new = np.array([[0, 1, 3, 2, 3, 0], [0, 1, 2, 2, 3, 0]], np.int16)
    moves = MoveTimes(hello(), old)

    def moved(rank: int, seconds: float, handover: int = 7, table: Any = new) -> Any:
        content = table.astype("<i2").tobytes()
        return moves.add(rank, MapMoved(handover=handover, map=content, received=1, seconds=seconds))

    assert moved(0, 0.2) is None
    first = moved(1, 0.3)
    assert (first.layers, first.bytes, first.seconds) == (1, 1200, 0.3)
    assert moved(1, 0.1, 8, old) is None
    back = moved(0, 0.1, 8, old)
    # expert 2 comes back to rank 0, which had dropped it for expert 3
    assert (back.layers, back.bytes, back.seconds) == (1, 1200, 0.1)
