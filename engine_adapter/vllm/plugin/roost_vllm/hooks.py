"""Places in vLLM's own classes where the plugin listens. They are changed once per process, before any object
is made.

`EplbState.add_model` makes the `ExpertRank`; `step` counts and votes; `rearrange` asks the policy, which
returns the map that all ranks agreed on, or the one in force."""

import functools
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from roost_vllm.digests import ExpertHasher
from roost_vllm.identity import Identity
from roost_vllm.maps import Table
from roost_vllm.names import TESTED, engine_version, missing_names
from roost_vllm.rank import Exchange, ExpertRank
from roost_vllm.settings import Settings
from roost_vllm.slot_digests import SlotDigests
from roost_vllm.taps import follow_captures, follow_copies

logger = logging.getLogger("vllm.roost")

_SECOND_MODEL = "a second model (a draft model) has experts, too"
_RANK = "_roost_rank"
"""Attribute of an `EplbState` that holds its `ExpertRank`."""


def rank_of(state: object) -> ExpertRank | None:
    """Return the rank of an `EplbState`; None when it has none."""
    return getattr(state, _RANK, None)


def install(settings: Settings) -> None:
    """Change vLLM's classes. Called again, it changes nothing."""
    missing = missing_names()
    if missing:
        logger.error(
            "roost: vLLM %s lacks %s; placements need %s.x", engine_version(), ", ".join(missing), TESTED
        )
    try:
        from vllm.distributed.eplb.eplb_state import EplbState
    except ImportError:
        return
    if not hasattr(EplbState, "add_model") or hasattr(EplbState, _RANK):
        return
    setattr(EplbState, _RANK, None)
    _after_add_model(EplbState, settings, missing)
    if not missing:
        _around_step(EplbState)
        _around_rearrange(EplbState)
        _before_forward(EplbState)
        # The counters of each step are needed, not only those of the window before a rearrangement.
        _record_all_steps(EplbState)


def _after_add_model(owner: Any, settings: Settings, missing: tuple[str, ...]) -> None:
    original = owner.add_model

    @functools.wraps(original)
    def add_model(self: Any, model: Any, model_config: Any, *rest: Any, **named: Any) -> Any:
        result = original(self, model, model_config, *rest, **named)
        try:
            _added(self, model, model_config, settings, missing)
        except Exception:
            # It failed on all ranks alike (see `_together`), and vLLM serves without the plugin.
            logger.exception("roost: this worker gets no placements and tells no demand")
        return result

    owner.add_model = add_model


def _added(state: Any, model: Any, model_config: Any, settings: Settings, missing: tuple[str, ...]) -> None:
    """Make the rank of a model that vLLM has just added."""
    if getattr(state.parallel_config, "enable_elastic_ep", False):
        logger.error("roost: elastic EP changes the expert ranks: no placements and no reports")
        return
    present = rank_of(state)
    if present is not None:
        present.refuse(_SECOND_MODEL)
        return
    if getattr(model_config, "runner_type", "") == "draft":
        return  # the model that it drafts for comes next
    rank = _expert_rank(state, model, model_config, settings, missing)
    if not missing:
        setattr(state, _RANK, rank)
        state.policy = MapPolicy(rank, state.policy)
        rank.reporting(_follow_requests, state, rank, model)
    rank.link.start()


def _follow_requests(state: Any, rank: ExpertRank, model: Any) -> None:
    """Listen to what vLLM tells of single requests."""
    _around_execute_model()
    if not rank.identity.tells_demand:
        return
    if state.device.type == "cpu":
        follow_captures(rank.tap, model)
    else:
        follow_copies(rank.copied, model)


def _around_step(owner: Any) -> None:
    original = owner.step

    @functools.wraps(original)
    def step(self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:
        rank = rank_of(self)
        if rank is None or is_profile:
            original(self, is_dummy, is_profile, log_stats)
            return
        with rank.spending():
            rank.end_step(is_dummy=is_dummy)
        original(self, is_dummy, is_profile, log_stats)
        with rank.spending():
            rank.after_step()

    owner.step = step


def _record_all_steps(owner: Any) -> None:
    original = owner._should_record_current_step

    @functools.wraps(original)
    def record(self: Any, *given: Any, **named: Any) -> bool:
        return rank_of(self) is not None or original(self, *given, **named)

    owner._should_record_current_step = record


def _around_rearrange(owner: Any) -> None:
    original = owner.rearrange

    @functools.wraps(original)
    def rearrange(
        self: Any, is_profile: bool = False, rank_mapping: Any = None, *rest: Any, **named: Any
    ) -> Any:
        policy = self.policy
        if isinstance(policy, MapPolicy):
            policy.is_own = not is_profile and rank_mapping is None
        result = original(self, is_profile, rank_mapping, *rest, **named)
        rank = rank_of(self)
        if rank is not None and not is_profile:
            rank.vllm_rearranged()
        return result

    owner.rearrange = rearrange


def _before_forward(owner: Any) -> None:
    original = owner.prepare_forward

    @functools.wraps(original)
    def prepare_forward(self: Any, *given: Any, **named: Any) -> Any:
        result = original(self, *given, **named)
        rank = rank_of(self)
        if rank is not None:
            with rank.spending():
                rank.begin_step()
        return result

    owner.prepare_forward = prepare_forward


def _around_execute_model() -> None:
    """Follow what the scheduler chooses. The worker's class is loaded once it has a model."""
    owner = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    if owner is None or hasattr(owner, _RANK):
        return
    setattr(owner, _RANK, None)
    original = owner.execute_model

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        rank = rank_of(getattr(getattr(self, "model_runner", None), "eplb_state", None))
        if rank is not None:
            with rank.spending():
                rank.schedule(self.model_runner, scheduler_output)
        return original(self, scheduler_output, *rest, **named)

    owner.execute_model = execute_model


class MapPolicy:
    """Policy of an `EplbState`: the agreed map once, else the map in force. vLLM's own decides in profile
    runs, for another width (elastic EP), and while it is in force by agreement."""

    def __init__(self, rank: ExpertRank, original: Any) -> None:
        self._rank = rank
        self._original = original
        self.is_own = True
        """the rearrangement that runs keeps the width and moves weights"""

    def rebalance_experts(
        self,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the map to be in force, int64 [layers, slots of all ranks]."""
        old = old_global_expert_indices
        is_same_width = old is not None and old.shape[1] == num_replicas
        if self.is_own and is_same_width:
            agreed = self._rank.take_agreed()
            if agreed is not None:
                return agreed.to(old.dtype)
            if not self._rank.is_fallback():
                return old.clone()
        return self._original.rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
        )


class _Eplb:
    """Access to one `EplbState` and one of its models."""

    def __init__(self, state: Any, model: Any) -> None:
        self._state = state
        self._model_state = next(one for one in state.model_states.values() if one.model is model)

    def read_map(self) -> Table:
        return self._model_state.physical_to_logical_map.cpu().numpy().astype(np.int16)

    def load(self) -> torch.Tensor:
        return self._model_state.expert_load_pass

    def rearrange(self) -> None:
        self._state.rearrange()

    def is_moving(self) -> bool:
        return self._state.is_async and self._model_state.rebalanced


def _exchange(group: Any, numbers: Sequence[int]) -> list[list[int]]:
    """Gather int64 numbers of all ranks over the CPU group of EPLB (asynchronous EPLB uses that one itself:
    then of EP)."""
    mine = torch.tensor(list(numbers), dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


_Made = TypeVar("_Made")


class RankFailed(Exception):
    """Raised on all ranks alike when one of them cannot take part."""


def _together(exchange: Exchange, work: Callable[[], _Made]) -> _Made:
    """Do work that may fail on one rank alone, and return its result once all ranks have done theirs. A
    collective. RankFailed on all ranks when it failed on one: a rank whose votes the others wait for, or that
    is left with another policy than theirs, would hang them."""
    made, failure = None, None
    try:
        made = work()
    except Exception as error:  # noqa: BLE001 - the cause of RankFailed
        failure = error
    failed = [rank for rank, row in enumerate(exchange([int(failure is not None)])) if row[0]]
    if failed:
        raise RankFailed(f"expert ranks {failed} cannot take part") from failure
    return cast(_Made, made)


def _expert_rank(
    state: Any, model: Any, model_config: Any, settings: Settings, missing: tuple[str, ...]
) -> ExpertRank:
    """Return the rank of a model. A collective. RankFailed on all ranks when one cannot have it."""
    from vllm.distributed.parallel_state import get_ep_group, get_eplb_group

    coordinator = get_ep_group() if state.parallel_config.eplb_config.use_async else get_eplb_group()
    exchange = functools.partial(_exchange, coordinator.cpu_group)
    hasher, own, identity = _together(
        exchange, lambda: _facts(state, model, model_config, settings, coordinator, missing)
    )
    rows = exchange([secrets.randbits(62), *own.reshape(-1).tolist()])
    digests = np.concatenate([np.array(row[1:]).reshape(own.shape) for row in rows], axis=1)
    identity = replace(identity, instance=f"{rows[0][0]:016x}")

    def made() -> ExpertRank:
        engine = _Eplb(state, model)
        refusal = _refusal(state, model_config, settings, missing)
        weights, device = model.expert_weights, state.device
        checked = SlotDigests(identity, engine.read_map(), digests, hasher, weights, device)
        return ExpertRank(identity, engine, exchange, checked, device, settings, refusal)

    return _together(exchange, made)


def _facts(
    state: Any, model: Any, model_config: Any, settings: Settings, group: Any, missing: tuple[str, ...]
) -> tuple[ExpertHasher, np.ndarray, Identity]:
    """Return what this rank finds alone: digests of its slots, and its identity without an instance."""
    if settings.fault:
        raise ValueError(settings.fault)
    hasher = ExpertHasher(state.device)
    slots = model.num_physical_experts // group.world_size
    own = _own_digests(hasher, model.expert_weights, slots, state.device)
    return hasher, own, _identity(state.parallel_config, model, model_config, group, missing)


def _own_digests(
    hasher: ExpertHasher, weights: Sequence[Sequence[torch.Tensor]], slots: int, device: torch.device
) -> np.ndarray:
    """Return the digests of this rank's slots, int64 [layers, slots]."""
    found = torch.zeros((len(weights), slots), dtype=torch.int64, device=device)
    for layer, tensors in enumerate(weights):
        for slot in range(slots):
            found[layer, slot] = hasher.digest([tensor[slot] for tensor in tensors])
    return found.cpu().numpy()


def _refusal(state: Any, model_config: Any, settings: Settings, missing: tuple[str, ...]) -> str:
    """Return why this vLLM gets no placements; empty: it gets them."""
    parallel = state.parallel_config
    if missing:
        return f"vLLM lacks {', '.join(missing)}"
    if len(state.model_states) > 1:
        return _SECOND_MODEL
    if model_config.runner_type == "pooling":
        return "a pooling model: its workers count steps differently"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: each stage has layers and an EPLB group of its own"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism: which ranks count which tokens is not known"
    if parallel.eplb_config.use_async and not settings.asynchronous:
        return (
            "asynchronous EPLB, which no test has run: "
            "set eplb-config use_async to false, or ROOST_ASYNC=experimental"
        )
    return ""


def _identity(parallel: Any, model: Any, model_config: Any, group: Any, missing: tuple[str, ...]) -> Identity:
    rank, ranks = group.rank_in_group, group.world_size
    targets = parallel.data_parallel_size
    own_tokens_only = bool(getattr(parallel, "use_sequence_parallel_moe", False))
    weights = model.expert_weights[0]
    return Identity(
        missing=missing,
        engine=engine_version(),
        instance="",
        rank=rank,
        ranks=ranks,
        target=parallel.data_parallel_rank,
        targets=targets,
        model=model_config.served_model_name or model_config.model,
        layers=model.num_moe_layers,
        experts=model.num_logical_experts,
        slots=model.num_physical_experts // ranks,
        top_k=model_config.get_num_experts_per_tok(),
        expert_bytes=sum(tensor[0].numel() * tensor.element_size() for tensor in weights),
        all2all=parallel.all2all_backend,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantisation=model_config.quantization or "",
        asynchronous=parallel.eplb_config.use_async,
        sees_all=targets == 1 and not own_tokens_only,
        tells_demand=own_tokens_only or rank % (ranks // targets) == 0,
    )
