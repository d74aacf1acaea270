"""What the plugin does to vLLM's `EplbState`, with a stand-in of that class."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from roost_vllm import hooks
from roost_vllm.link import Link
from roost_vllm.settings import Settings
from roost_vllm.wire import MapMoved

LAYERS, EXPERTS, SLOTS = 2, 3, 2
"""Two ranks of two slots each."""


class Group:
    """Two ranks. The other one says what this one says, but for what `other` changes."""

    rank_in_group, world_size = 0, 2

    def __init__(self) -> None:
        self.cpu_group = self
        self.other: Callable[[torch.Tensor], torch.Tensor] = lambda mine: mine
        self.exchanges = 0

    def size(self) -> int:
        return self.world_size

    def gather(self, rows: list[torch.Tensor], mine: torch.Tensor, group: "Group") -> None:
        assert group is self
        self.exchanges += 1
        rows[0].copy_(mine)
        rows[1].copy_(self.other(mine))


CHOSEN = torch.tensor([[2, 1, 0, 0]] * LAYERS)


class Vllms:
    """vLLM's own policy."""

    @staticmethod
    def rebalance_experts(*_: Any) -> torch.Tensor:
        return CHOSEN


def eplb_class() -> Any:
    """`EplbState`, as far as the plugin uses it."""

    class EplbState:
        def __init__(self, parallel_config: Any) -> None:
            self.parallel_config = parallel_config
            self.device = torch.device("cpu")
            self.model_states: dict[str, Any] = {}
            self.policy: Any = None
            self.is_async = parallel_config.eplb_config.use_async
            self.steps = 0

        def add_model(self, model: Any, model_config: Any, model_name: str | None = None) -> str:
            table = torch.tensor([[0, 1, 2, 0]] * LAYERS)
            load = torch.zeros(table.shape, dtype=torch.int32)
            self.model_states[model_config.model] = SimpleNamespace(
                physical_to_logical_map=table, expert_load_pass=load, rebalanced=False, model=model
            )
            self.policy = Vllms
            return "added"

        def step(self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:
            self.steps += 1

        def rearrange(self, is_profile: bool = False, rank_mapping: Any = None) -> None: ...

        def prepare_forward(self) -> None: ...

        def _should_record_current_step(self, log_stats: bool = False) -> bool:
            return False

    return EplbState


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def eplb(group: Group, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, in modules of vLLM's names."""
    states, parallel = ModuleType("states"), ModuleType("parallel")
    found = eplb_class()
    states.__dict__["EplbState"] = found
    parallel.__dict__.update(get_ep_group=lambda: group, get_eplb_group=lambda: group)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.eplb.eplb_state", states)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", parallel)
    monkeypatch.setattr(torch.distributed, "all_gather", group.gather)
    monkeypatch.setattr(hooks, "missing_names", lambda: ())
    return found


def model() -> Any:
    weights = [[torch.arange(SLOTS * 5.0).view(SLOTS, 5) % 5] for _ in range(LAYERS)]
    return SimpleNamespace(
        expert_weights=weights, num_moe_layers=LAYERS, num_logical_experts=EXPERTS,
        num_physical_experts=2 * SLOTS, moe_layers=[SimpleNamespace() for _ in range(LAYERS)],
    )  # fmt: skip


def model_config(name: str = "m", **others: Any) -> Any:
    fields = {
        "model": name, "served_model_name": name, "dtype": torch.float32, "quantization": None,
        "runner_type": "generate", "get_num_experts_per_tok": lambda: 2,
    }  # fmt: skip
    return SimpleNamespace(**fields | others)


def parallel_config(*, use_async: bool = False, pipeline_parallel_size: int = 1) -> Any:
    return SimpleNamespace(
        eplb_config=SimpleNamespace(use_async=use_async), enable_elastic_ep=False, all2all_backend="naive",
        data_parallel_rank=0, data_parallel_size=1, pipeline_parallel_size=pipeline_parallel_size,
    )  # fmt: skip


SETTINGS = Settings("127.0.0.1", 1, b"secret")


@pytest.fixture
def started(eplb: Any) -> Iterator[list[Any]]:
    """States of EPLB whose ranks' links are to be ended."""
    states: list[Any] = []
    yield states
    for state in states:
        rank = hooks.rank_of(state)
        if rank is not None and rank.link.is_alive():
            rank.link.stop()
            rank.link.join(10)


def test_a_model_gets_a_rank_and_the_policy_of_the_agent(eplb: Any, started: list[Any]) -> None:
    hooks.install(SETTINGS)
    started.append(state := eplb(parallel_config()))
    assert state.add_model(model(), model_config()) == "added"
    rank = hooks.rank_of(state)
    assert rank is not None
    assert rank.link.is_alive()
    assert isinstance(state.policy, hooks.MapPolicy)
    assert state._should_record_current_step()
    state.step()
    assert state.steps == 1


def is_vllm_alone(state: Any) -> bool:
    """vLLM serves as without the plugin."""
    state.step()
    is_same = state.policy is Vllms and not state._should_record_current_step()
    return hooks.rank_of(state) is None and is_same and state.steps == 1


@pytest.mark.parametrize("lacks", ["get_num_experts_per_tok", "dtype", "runner_type"])
def test_a_vllm_that_lacks_a_name_serves_without_the_plugin(eplb: Any, group: Group, lacks: str) -> None:
    hooks.install(SETTINGS)
    state, config = eplb(parallel_config()), model_config()
    delattr(config, lacks)
    assert state.add_model(model(), config) == "added"
    assert is_vllm_alone(state)
    assert group.exchanges > 0, "the other ranks are told"


def test_no_rank_takes_part_when_another_cannot(eplb: Any, group: Group) -> None:
    hooks.install(SETTINGS)
    state = eplb(parallel_config())
    group.other = lambda mine: torch.ones_like(mine)
    assert state.add_model(model(), model_config()) == "added"
    assert is_vllm_alone(state)


def test_a_rank_without_settings_tells_the_others_so(
    eplb: Any, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.install(Settings("", 0, b"", fault="ROOST_SECRET_FILE is empty"))
    said: list[list[int]] = []
    group.other = lambda mine: (said.append(mine.tolist()), torch.zeros_like(mine))[1]
    state = eplb(parallel_config())
    assert state.add_model(model(), model_config()) == "added"
    assert is_vllm_alone(state)
    assert said == [[1]]
    assert "ROOST_SECRET_FILE is empty" in caplog.text


@pytest.mark.parametrize(
    ("parallel", "config", "words"),
    [
        ({"use_async": True}, {}, "asynchronous EPLB"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline parallelism"),
        ({}, {"runner_type": "pooling"}, "a pooling model"),
    ],
)
def test_a_vllm_that_gets_no_placements_balances_itself(
    eplb: Any,
    started: list[Any],
    caplog: pytest.LogCaptureFixture,
    parallel: dict[str, Any],
    config: dict[str, Any],
    words: str,
) -> None:
    hooks.install(SETTINGS)
    started.append(state := eplb(parallel_config(**parallel)))
    state.add_model(model(), model_config(**config))
    assert words in caplog.text
    old = torch.tensor([[0, 1, 2, 0]] * LAYERS)
    chosen = state.policy.rebalance_experts(torch.ones(LAYERS, EXPERTS), 4, 1, 1, 2, old)
    assert torch.equal(chosen, CHOSEN)


DRAFT_FIRST = [("draft", "draft"), ("large", "generate")]


@pytest.mark.parametrize("order", [DRAFT_FIRST, DRAFT_FIRST[::-1]])
def test_beside_a_draft_model_with_experts_demand_is_told_and_vllm_balances_both(
    eplb: Any, started: list[Any], order: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    introductions: list[str] = []
    monkeypatch.setattr(Link, "start", lambda link: introductions.append("first"))
    monkeypatch.setattr(Link, "introduce_again", lambda link: introductions.append("again"))
    hooks.install(SETTINGS)
    started.append(state := eplb(parallel_config()))
    for name, runner in order:
        state.add_model(model(), model_config(name, runner_type=runner))
    rank = hooks.rank_of(state)
    assert rank is not None
    hello = rank.hello(proof=b"", nonce=b"")
    assert (hello.model, hello.refuses) == ("large", "a second model (a draft model) has experts, too")
    assert introductions == (["first"] if order is DRAFT_FIRST else ["first", "again"])
    old = torch.tensor([[0, 1, 2, 0]] * LAYERS)
    assert torch.equal(state.policy.rebalance_experts(torch.ones(LAYERS, EXPERTS), 4, 1, 1, 2, old), CHOSEN)

    told: list[Any] = []
    monkeypatch.setattr(Link, "send", lambda link, message: told.append(message))
    state.model_states["large"].physical_to_logical_map.copy_(CHOSEN)
    state.rearrange()
    state.step()
    (moved,) = [message for message in told if isinstance(message, MapMoved)]
    assert moved.map == CHOSEN.numpy().astype("<i2").tobytes()
