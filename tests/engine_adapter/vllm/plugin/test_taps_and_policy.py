"""What the plugin listens to inside vLLM, with stand-ins of the few fields that it reads."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from roost_vllm.hooks import MapPolicy
from roost_vllm.taps import RequestTap, follow_captures, follow_copies

LAYERS = 2


def scheduled(
    tokens: dict[str, int], *, new: dict[str, int] | None = None, ended: tuple[str, ...] = ()
) -> Any:
    """A `SchedulerOutput`."""
    starting = [SimpleNamespace(req_id=name, prompt_len=length) for name, length in (new or {}).items()]
    return SimpleNamespace(
        finished_req_ids=set(ended), scheduled_new_reqs=starting, num_scheduled_tokens=tokens
    )


def runner(first: dict[str, int]) -> Any:
    """A model runner with its batch, in the order of rows."""
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(first), num_computed_tokens_cpu=np.array([*first.values()]))
    )


def forward(tap: RequestTap, step: Any, first: dict[str, int], rows: list[list[int]]) -> None:
    """One step: every layer routes row r to the experts rows[r] + layer."""
    tap.begin(step)
    tap.forward(runner(first), step)
    for layer in range(LAYERS):
        tap.capture(layer, torch.tensor(rows) + layer)
    tap.end_forward()


def test_rows_go_to_the_requests_of_the_batch_in_its_order() -> None:
    tap = RequestTap(LAYERS)
    first = scheduled({"a": 2, "b": 1}, new={"a": 2, "b": 17})
    forward(tap, first, {"b": 16, "a": 0}, [[5, 6], [1, 2], [3, 4], [9, 9]])  # the last row is padding
    forward(tap, scheduled({"b": 1}), {"b": 17}, [[7, 8]])
    (report,) = tap.begin(scheduled({}, ended=("b",)))
    assert (report.request, report.prompt_tokens, report.first, report.positions) == ("b", 17, 16, 2)
    told = np.frombuffer(report.experts, "<i2").reshape(2, LAYERS, 2)
    assert told.tolist() == [[[5, 6], [6, 7]], [[7, 8], [8, 9]]]


def test_a_dummy_pass_is_no_ones() -> None:
    tap = RequestTap(LAYERS)
    forward(tap, scheduled({"a": 1}, new={"a": 1}), {"a": 0}, [[1, 2]])
    for layer in range(LAYERS):
        tap.capture(layer, torch.tensor([[0, 0]]))
    tap.end_forward()
    (report,) = tap.begin(scheduled({}, ended=("a",)))
    assert report.positions == 1


def test_a_pass_that_a_layer_did_not_tell_is_left_out() -> None:
    tap = RequestTap(LAYERS)
    step = scheduled({"a": 1}, new={"a": 1})
    tap.begin(step)
    tap.forward(runner({"a": 0}), step)
    tap.capture(0, torch.tensor([[1, 2]]))
    tap.end_forward()
    assert tap.begin(scheduled({}, ended=("a",))) == []


def test_who_captured_before_still_captures() -> None:
    seen: list[list[list[int]]] = []

    class Router:
        capture_fn = staticmethod(lambda experts: seen.append(experts.tolist()))

        def set_capture_fn(self, function: Any) -> None:
            self.capture_fn = function

    routers = [Router() for _ in range(LAYERS)]
    tap = RequestTap(LAYERS)
    follow_captures(tap, SimpleNamespace(moe_layers=[SimpleNamespace(router=one) for one in routers]))
    step = scheduled({"a": 1}, new={"a": 1})
    tap.begin(step)
    tap.forward(runner({"a": 0}), step)
    for router in routers:
        router.capture_fn(torch.tensor([[4, 2]]))
    tap.end_forward()
    assert seen == [[[4, 2]]] * LAYERS
    assert len(tap.begin(scheduled({}, ended=("a",)))) == 1


def test_rows_that_vllm_copies_to_the_host_are_read_without_rejected_tokens_and_dense_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AuxOutputWorkerConnector:
        """Field by field as in vLLM 0.32."""

        def process_output(self, pending: Any) -> str:
            return f"outputs of {len(pending.request_ids)}"

    name = "vllm.distributed.aux_output_connector.worker"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(AuxOutputWorkerConnector=AuxOutputWorkerConnector))
    tap = RequestTap(LAYERS)
    model = SimpleNamespace(moe_layers=[SimpleNamespace(layer_id=1), SimpleNamespace(layer_id=2)])
    follow_copies(tap.copied, model)
    follow_copies(tap.copied, model)
    tap.begin(scheduled({"a": 3, "b": 1}, new={"a": 2, "b": 1}))
    pending = SimpleNamespace(
        request_ids=["a", "b"],
        token_starts=np.array([4, 0]),
        query_start_loc=np.array([0, 3, 4]),
        num_rejected=np.array([1, 0]),
        routed_experts=np.arange(4 * 3, dtype=np.uint8).reshape(4, 3, 1),
    )
    assert AuxOutputWorkerConnector().process_output(pending) == "outputs of 2"
    assert AuxOutputWorkerConnector().process_output(NOTHING) == "outputs of 0"
    (report,) = tap.begin(scheduled({}, ended=("a",)))
    assert (report.first, report.positions) == (4, 2)
    assert np.frombuffer(report.experts, "<i2").tolist() == [1, 2, 4, 5]


NOTHING = SimpleNamespace(
    request_ids=[],
    token_starts=np.array([], int),
    query_start_loc=np.array([0]),
    num_rejected=np.array([], int),
    routed_experts=np.zeros((0, 3, 1), np.uint8),
)
"""Outputs of a step without requests."""

OLD = torch.tensor([[0, 1, 2, 0]])
AGREED = torch.tensor([[2, 1, 0, 2]])
CHOSEN = torch.tensor([[1, 1, 2, 0]])


class Rank:
    """What the policy asks of a rank."""

    def __init__(self, *, fallback: bool = False) -> None:
        self.agreed: torch.Tensor | None = None
        self.fallback = fallback

    def take_agreed(self) -> torch.Tensor | None:
        agreed, self.agreed = self.agreed, None
        return agreed

    def is_fallback(self) -> bool:
        return self.fallback


class Vllms:
    """vLLM's own policy."""

    @classmethod
    def rebalance_experts(cls, *_: Any) -> torch.Tensor:
        return CHOSEN


def asked(policy: MapPolicy, width: int = 4) -> torch.Tensor:
    return policy.rebalance_experts(torch.ones(1, 3), width, 1, 1, 2, OLD)


def test_the_policy_returns_the_agreed_map_once_and_then_the_one_in_force() -> None:
    rank = Rank()
    policy = MapPolicy(rank, Vllms)
    assert torch.equal(asked(policy), OLD)
    rank.agreed = AGREED
    assert torch.equal(asked(policy), AGREED)
    assert torch.equal(asked(policy), OLD)


@pytest.mark.parametrize("case", ["profile", "elastic", "fallback"])
def test_vllms_own_policy_decides_in_profile_runs_for_another_width_and_while_it_is_in_force(
    case: str,
) -> None:
    rank = Rank(fallback=case == "fallback")
    policy = MapPolicy(rank, Vllms)
    policy.is_own = case != "profile"
    assert torch.equal(asked(policy, width=6 if case == "elastic" else 4), CHOSEN)


def test_an_agreed_map_waits_for_a_rearrangement_of_its_own() -> None:
    rank = Rank()
    rank.agreed = AGREED
    policy = MapPolicy(rank, Vllms)
    policy.is_own = False
    assert torch.equal(asked(policy), CHOSEN)
    policy.is_own = True
    assert torch.equal(asked(policy), AGREED)
