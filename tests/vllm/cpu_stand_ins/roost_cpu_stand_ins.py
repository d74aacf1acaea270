"""What vLLM 0.32 lacks on the CPU for expert parallelism with EPLB. For tests; nothing here is needed on a
GPU.

A general plugin of vLLM: `tests/vllm/server.py` puts this folder on PYTHONPATH. Each stand-in replaces one
place, named in its docstring, and does what the GPU build does there."""

import importlib
import time
from typing import Any

import numpy as np
import torch

KNUTH = 2654435769
"""Multiplier of the replica hash in vLLM's own kernel (`base_router.py`)."""


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    _admit_eplb()
    _respect_expert_map()
    _map_and_record()
    _gather_and_scatter_unequal_parts()
    _make_eplb_state()


class _Admitted:
    """The platform, which says that it is like CUDA."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _admit_eplb() -> None:
    """`config/parallel.py`: `--enable-eplb` is refused on the CPU."""
    module = importlib.import_module("vllm.config.parallel")
    if not isinstance(module.current_platform, _Admitted):
        module.current_platform = _Admitted(module.current_platform)


def _respect_expert_map() -> None:
    """`fused_moe/experts/cpu_moe.py`: the native kernel ignores `expert_map` and reads beyond its weights."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if "UnquantizedFusedMoEMethod" in op_registry_oot:
        return

    @CustomOp.register_oot(name="UnquantizedFusedMoEMethod")
    class OwnExpertsMethod(UnquantizedFusedMoEMethod):
        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            self.experts_cls = _own_experts(self.experts_cls)


def _own_experts(owner: type) -> type:
    """Return experts whose foreign (token, k) pairs go to local slot 0 with weight 0."""

    class OwnExperts(owner):
        def apply(self, *, topk_weights, topk_ids, expert_map, **named) -> None:
            if expert_map is not None:
                local = expert_map[topk_ids.long()]
                is_foreign = local < 0
                topk_ids = local.masked_fill(is_foreign, 0).to(topk_ids.dtype)
                topk_weights = topk_weights.masked_fill(is_foreign, 0.0)
            super().apply(topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **named)

    OwnExperts.__name__ = OwnExperts.__qualname__ = f"Own{owner.__name__}"
    return OwnExperts


def map_to_physical_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return physical for logical experts [rows, k], and count them: vLLM's kernel in numpy, whose calls on so
    few numbers take a fraction of torch's. On a GPU one fused kernel does both, and only masks the count."""
    logical = topk_ids.numpy()
    copies = np.maximum(logical_replica_count.numpy()[logical], 1)
    replica = (np.arange(len(logical)) * KNUTH & 0xFFFFFFFF)[:, None] % copies
    physical = logical_to_physical_map.numpy()[logical, replica]
    if record_enabled:
        counted = physical if num_unpadded_tokens is None else physical[: int(num_unpadded_tokens)]
        load = expert_load_view.numpy()
        load += np.bincount(counted.ravel(), minlength=len(load)).astype(load.dtype)
    return torch.from_numpy(physical.astype(logical.dtype))


def _map_and_record() -> None:
    """`fused_moe/router/base_router.py`: on the CPU the map from logical to physical experts is the
    identity."""
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.router.base_router")
    module.eplb_map_to_physical_and_record = map_to_physical_and_record


def _gather_and_scatter_unequal_parts() -> None:
    """`device_communicators/cpu_communicator.py`: no all_gatherv and no reduce_scatterv."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, input_, dim=0, sizes=None):
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        assert dim == 0
        sizes = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        first = sum(sizes[: self.rank_in_group])
        return total[first : first + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


class WallClockEvent:
    """Stands for `torch.Event`: on the CPU work is done when it was called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, *_: Any) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: "WallClockEvent") -> float:
        return (other._at - self._at) * 1000

    def wait(self, *_: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


def _make_eplb_state() -> None:
    """`v1/worker/cpu_model_runner.py`: the runner of the CPU makes no EplbState. `eplb_state.py` records
    events of a device."""
    from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

    runner = importlib.import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    original = runner.load_model
    if getattr(original, "is_stand_in", False):
        return

    def load_model(self, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        if not self.parallel_config.enable_eplb:
            return
        torch.Event = WallClockEvent
        from vllm.distributed.eplb.eplb_state import EplbState

        self._moe_model = get_mixture_of_experts_model(self.model)
        self.eplb_state = EplbState(self.parallel_config, self.device)
        self.eplb_state.add_model(self._moe_model, self.model_config)

    load_model.is_stand_in = True
    runner.load_model = load_model
