"""Forward pass of one rank: work in, logits and routing out. Handles pages and positions; knows no
requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.arena import Arena, load_arena, unshardable
from engine_adapter.embedded.attention import (
    Attention,
    AttentionPlan,
    Rotary,
    plan_attention,
)
from engine_adapter.embedded.checkpoint import RUN_DTYPES, Checkpoint, Qwen3MoeConfig
from engine_adapter.embedded.dispatch import Dispatch, GlooDispatch, LocalDispatch, Sending, least_rows
from engine_adapter.embedded.kernels.row_operations import product, rms_norm
from engine_adapter.embedded.kv_pool import KvPool
from engine_adapter.embedded.layers import Layer, load_layer
from engine_adapter.embedded.malloc_tuning import keep_freed_memory
from engine_adapter.embedded.moe import CellMatrices
from engine_adapter.embedded.paged_attention import PAGE_TOKENS, PagedPlan, SequenceSpan
from engine_adapter.embedded.sequence_parallel import ThreadTeam, share
from engine_adapter.embedded.step_sync import RankGroup
from engine_adapter.embedded.tensor_parallel import TensorParallel, part_of_attention
from engine_adapter.engine import RankMemory
from fleet.experts import ModelShape
from fleet.layout import AttentionKind, head_groups, tp_refusal
from fleet.placement import Placement


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """Work of one sequence in one step: compute `tokens` at positions start, start + 1, and so on."""

    tokens: Sequence[int]
    """IDs to compute now, at least one."""
    start: int
    """Position of tokens[0]. The KV of every earlier position is already in `pages`."""
    pages: Sequence[int]
    """IDs of the pages that cover positions 0 .. start + len(tokens) - 1, in order. More pages are allowed.
    The pages of `tokens` belong to this work alone."""
    needs_logits: bool
    """True if the logits after the last of `tokens` are needed."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Results of a step."""

    logits: torch.Tensor
    """fp32 [works that need logits, vocabulary], in the order of the works."""
    routed: NDArray[Any]
    """uint8 (uint16 above 256 experts) [tokens, layers, k]: the experts chosen for every computed token,
    ordered by work, then by token."""
    served_by: Sequence[NDArray[np.int64]] = ()
    """int64 [tokens of all ranks, k] per whole layer, tokens ordered by rank: the rank that served each pair.
    Empty with one rank."""


class WorkError(ValueError):
    """A work that no step can compute. The text names the work and the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedEpoch:
    """Everything needed to serve one epoch (`engine_adapter.engine.Adoption`). Adopting it only swaps
    references."""

    placement: Placement
    cells: NDArray[np.int32]
    """[layers, slots_per_rank]. A sharded layer computes with the first ceil(experts / ranks) of its cells
    (`fleet.sharding`)."""
    layers: Sequence[Layer]
    sending: Sending


class ModelRunner:
    """One rank of the engine: its weights, its KV pages, its forward pass. Used by one thread, which is
    limited to one torch thread.

    An engine of one rank may split large steps among several threads, by sequence. With several ranks, the
    ranks already split them.

    With one torch thread and every matrix product padded to `least_rows`, a token's fp32 results have the
    same bits whatever the rest of the batch and the location of its experts. Only the forms of the layers
    (whole or sharded) and the attention (data-parallel or tensor-parallel) change its last bits.

    Where a prompt is cut into chunks changes them in the last bits, because attention computes single tokens
    and chunks by different kernels.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        placement: Placement,
        *,
        rank: int = 0,
        group: RankGroup | None = None,
        kv_pages: int = 1024,
        dtype: str = "float32",
        max_tokens: int = 2048,
        threads: int = 1,
        cover: bool = False,
        ballast_bytes: int = 0,
        spare_layers: int = 1,
        check_digest: bool = False,
    ) -> None:
        """Load this rank's weights (of the experts only its own) and allocate `kv_pages` pages of KV (of
        data-parallel attention). The checkpoint may be closed afterwards.

        group: the other ranks. None for an engine of one rank. max_tokens: limit on the tokens of one rank in
        one step. threads: threads that share a large step of an engine of one rank. close() ends them.
        CheckpointError when a tensor cannot be read. ValueError when placement, group or sizes do not fit the
        model. cover: as in `GlooDispatch`. ballast_bytes, spare_layers: as in `Arena`. check_digest: as in
        `TensorParallel`.
        """
        if kv_pages < 1 or max_tokens < 1 or dtype not in RUN_DTYPES:
            raise ValueError(
                f"runner: kv_pages {kv_pages} and max_tokens {max_tokens} must be at least 1, dtype {dtype!r}"
                f" one of {', '.join(RUN_DTYPES)}"
            )
        if placement.ranks != (1 if group is None else group.ranks):
            raise ValueError(
                f"runner: {placement!r} does not fit {1 if group is None else group.ranks} ranks"
            )
        self.config = checkpoint.config
        self.shape = checkpoint.config.shape(dtype)
        _check_attention(placement, self.shape)
        torch.set_num_threads(1)
        keep_freed_memory()
        self.rank = rank
        self._group = group
        self.max_tokens = max_tokens
        self._dtype = RUN_DTYPES[dtype]
        self.arena = load_arena(checkpoint, placement, rank, dtype, ballast_bytes, spare_layers)
        self._matrices = CellMatrices(self.arena, self.config.experts)
        self._group_rows = _group_rows(self.config, self._dtype, placement.ranks, self.arena.parts)
        self._team = ThreadTeam(threads if group is None else 1)
        # One per thread, since a dispatch is open until its combine. The first one handles whole-step calls.
        self._dispatches: list[Dispatch] = (
            [
                LocalDispatch(placement, max_tokens, group_rows=self._group_rows)
                for _ in range(self._team.threads)
            ]
            if group is None
            else [GlooDispatch(group, placement, max_tokens, cover=cover, group_rows=self._group_rows)]
        )
        self._routed_dtype = np.uint8 if self.config.experts <= 256 else np.uint16
        self._load_dense(checkpoint)
        self._tensor_parallel = (
            None
            if group is None or tp_refusal(self.shape, group.ranks)
            else TensorParallel(
                group,
                self._head,
                experts=self.config.experts,
                max_tokens=max_tokens,
                group_rows=self._group_rows,
                check_digest=check_digest,
            )
        )
        self._served = self._load_layers(checkpoint, placement)
        self.kv_pool = self._new_pool(kv_pages)
        self.adopt_kv(self.kv_pool.first_units(self._units_of_page))

    def _load_dense(self, checkpoint: Checkpoint) -> None:
        """Load the weights outside of layers."""
        self._rotary = Rotary(self.config, self._dtype)
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", self._dtype)
        self._norm = checkpoint.tensor("model.norm.weight", self._dtype)
        self._head = self._embedding if self.config.tied else checkpoint.tensor("lm_head.weight", self._dtype)

    def _load_layers(self, checkpoint: Checkpoint, placement: Placement) -> PreparedEpoch:
        cells = self.arena.first_cells()
        layers = [
            load_layer(
                checkpoint, at, self._dtype, self._matrices, cells[at], sharded=at in placement.sharded
            )
            for at in range(self.config.layers)
        ]
        whole = [layer.attention for layer in layers]
        parts = (
            whole
            if self._tensor_parallel is None
            else [part_of_attention(one, self.rank, placement.ranks) for one in whole]
        )
        self._attentions: Mapping[AttentionKind, list[Attention]] = {"dp": whole, "tp": parts}
        return self._prepared(placement, cells, layers)

    def _prepared(
        self, placement: Placement, cells: NDArray[np.int32], layers: Sequence[Layer]
    ) -> PreparedEpoch:
        """layers: with any attention."""
        attentions = self._attentions[placement.attention]
        cells = cells.copy()
        cells.flags.writeable = False
        return PreparedEpoch(
            placement,
            cells,
            [replace(layer, attention=one) for layer, one in zip(layers, attentions, strict=True)],
            self._dispatches[0].sending(placement),
        )

    def _new_pool(self, pages: int) -> KvPool:
        """pages: of data-parallel attention."""
        config, ranks = self.config, self.placement.ranks
        return KvPool(
            pages=pages,
            groups=1 if tp_refusal(self.shape, ranks) else head_groups(ranks, config.kv_heads),
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_tokens=PAGE_TOKENS,
            dtype=self._dtype,
        )

    def close(self) -> None:
        """End the threads that share large steps."""
        self._team.close()

    @property
    def placement(self) -> Placement:
        """The served placement."""
        return self._served.placement

    @property
    def served(self) -> PreparedEpoch:
        """The served epoch. It may be adopted again, after others have been tried between steps."""
        return self._served

    @property
    def dispatch(self) -> Dispatch:
        """Exchange of the ranks in steps of data-parallel attention."""
        return self._dispatches[0]

    @property
    def computes_tp(self) -> bool:
        """True if the ranks can compute tensor-parallel attention, with the experts of all layers sharded."""
        return self._tensor_parallel is not None and self.arena.parts == self.placement.ranks

    @property
    def cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots_per_rank]: the cell of each slot in the served epoch. Read-only."""
        return self._served.cells

    @property
    def kv_units(self) -> NDArray[np.int32]:
        """int32 [pages, units of a page]: the units of every page that `SequenceWork` may name. Read-only."""
        return self._pages.units

    @property
    def _units_of_page(self) -> int:
        """Units that this rank has of a page."""
        return self.kv_pool.groups if self.placement.attention == "dp" else 1

    @property
    def kv_pages(self) -> int:
        """Number of pages that `SequenceWork` may name."""
        return len(self._pages.units)

    @property
    def memory(self) -> RankMemory:
        """Memory of this rank beside its expert cells, without that of connections to other ranks."""
        layers = self._served.layers
        head = 0 if self.config.tied else self._head.nbytes
        return RankMemory(
            attention=self._rotary.nbytes
            + sum(one.nbytes for one in self._attentions["dp"])
            + sum(layer.attention_norm.nbytes for layer in layers),
            other_weights=self._embedding.nbytes
            + self._norm.nbytes
            + head
            + sum(layer.block.gate.nbytes + layer.block_norm.nbytes for layer in layers),
            kv_pool=self.kv_pool.nbytes,
        )

    def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> PreparedEpoch:
        """Prepare to serve a placement with this rank's slots in these cells. Thread-safe, parallel to steps;
        changes nothing. ValueError when it does not fit the served placement or the arena."""
        served = self._served
        _check_adoption(served.placement, placement, cells, self.arena)
        kept = (cells == served.cells).all(axis=1)
        kept[list(set(served.placement.sharded) ^ set(placement.sharded))] = False
        layers = [
            layer if same else layer.with_cells(self._matrices, cells[at], sharded=at in placement.sharded)
            for at, (layer, same) in enumerate(zip(served.layers, kept.tolist(), strict=True))
        ]
        return self._prepared(placement, cells, layers)

    def adopt(self, prepared: PreparedEpoch) -> None:
        """Serve a prepared epoch. Every rank calls it between the same two steps. If the attention changes,
        every page has other units, so `adopt_kv` follows before the next step."""
        self._served = prepared
        for dispatch in self._dispatches:
            dispatch.adopt(prepared.sending)

    def adopt_kv(self, units: NDArray[np.int32]) -> None:
        """Number the pages anew: page p consists of units[p], int32 [pages, units of a page]. Called between
        two steps. Under data-parallel attention, a page has a unit of each head group. Under tensor-parallel
        attention, it has one unit on every rank. ValueError as for `KvPool.page_table`."""
        self._pages = self.kv_pool.page_table(units, self._units_of_page)

    def slow_links(self, token_seconds: float, collective_seconds: float = 0.0) -> None:
        """Emulate a network from now on: apply `Dispatch.slow_links` to all threads of this rank, and
        `RankGroup.slow_collectives`. Call it between two steps."""
        for dispatch in self._dispatches:
            dispatch.slow_links(token_seconds)
        if self._tensor_parallel is not None:
            self._tensor_parallel.slow_links(token_seconds)
        if self._group is not None:
            self._group.slow_collectives(collective_seconds)

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        """Compute one step. All ranks call it for the same step. Under data-parallel attention, each brings
        its own work, and a rank without work passes an empty sequence. Under tensor-parallel attention, all
        bring the same work and get the same results.

        tokens_by_rank: from the step headers (None: the ranks exchange them again). Not used under
        tensor-parallel attention. WorkError and DispatchError are raised before anything is computed or sent.
        PeerLost and PeerTimeout when another rank fails. StepMismatch as for `TensorParallel.end_step`.
        """
        if torch.get_num_threads() != 1:
            # The setting is per thread, for threads that ran before the runner was created.
            torch.set_num_threads(1)
        self._check(work)
        counts = [len(one.tokens) for one in work]
        sums = self._sums
        if sums is None:
            self._dispatches[0].begin_step(sum(counts), tokens_by_rank)
        else:
            sums.begin_step(sum(counts))
        parts = [work[part] for part in share(counts, self._team.threads)]
        found = self._team.run(
            [
                partial(self._compute, part, dispatch)
                for part, dispatch in zip(parts, self._dispatches, strict=False)
            ]
        )
        if len(found) == 1:
            return found[0]
        return Forward(
            torch.cat([one.logits for one in found]), np.concatenate([one.routed for one in found])
        )

    @property
    def _sums(self) -> TensorParallel | None:
        """Sums over the ranks. None if every rank computes its own tokens."""
        return self._tensor_parallel if self.placement.attention == "tp" else None

    @torch.inference_mode()
    def _compute(self, work: Sequence[SequenceWork], dispatch: Dispatch) -> Forward:
        """Compute one thread's part of a step: all of it, or some of its sequences."""
        ids = list(chain.from_iterable(one.tokens for one in work))
        rows = max(len(ids), self._group_rows) if ids else 0
        spans = [SequenceSpan(len(one.tokens), one.start, one.pages) for one in work]
        plan = plan_attention(spans, rows, self._pages.rows, PAGE_TOKENS, self._rotary)
        hidden = self._embedding.index_select(
            0, torch.tensor(ids + [0] * (rows - len(ids)), dtype=torch.int64)
        )
        routed = np.empty((len(ids), self.config.layers, self.config.top_k), self._routed_dtype)
        for layer in range(self.config.layers):
            routed[:, layer] = self._layer(layer, hidden, len(ids), plan, dispatch)
        if self._sums is None:
            return Forward(self._logits(hidden, work), routed, dispatch.served_by)
        self._sums.end_step(hidden[: len(ids)])
        return Forward(self._logits(hidden, work), routed)

    def _layer(
        self,
        at: int,
        hidden: torch.Tensor,
        tokens: int,
        plan: AttentionPlan | PagedPlan,
        dispatch: Dispatch,
    ) -> NDArray[Any]:
        """Run one layer on the residual stream [rows, H], in place. Return the chosen experts, [tokens,
        k]."""
        layer, sums = self._served.layers[at], self._sums
        if tokens:
            normed = self._normed(hidden, layer.attention_norm)
            mixed = layer.attention.forward(normed, plan, self.kv_pool.layer(at))[:tokens]
            hidden[:tokens] += mixed if sums is None else sums.total(mixed).to(hidden.dtype)
        normed = self._normed(hidden, layer.block_norm)
        if sums is None:
            mixed, experts = layer.block.forward(normed, tokens, dispatch)
        else:
            mixed, experts = layer.block.forward_parts(normed, tokens, sums)
        hidden[:tokens] += mixed.to(hidden.dtype)
        return experts

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight, self.config.rms_eps)

    def _logits(self, hidden: torch.Tensor, work: Sequence[SequenceWork]) -> torch.Tensor:
        ends = np.cumsum([len(one.tokens) for one in work], dtype=np.int64)
        ends_needed = [int(end) - 1 for end, one in zip(ends, work, strict=True) if one.needs_logits]
        if not ends_needed:
            return torch.empty((0, self.config.vocabulary), dtype=torch.float32)
        padded = ends_needed + ends_needed[:1] * (self._group_rows - len(ends_needed))
        last = hidden.index_select(0, torch.tensor(padded))
        normed, count = self._normed(last, self._norm), len(ends_needed)
        sums = self._sums
        logits = product(normed, self._head)[:count] if sums is None else sums.logits(normed, count)
        return logits.to(torch.float32)

    def _check(self, work: Sequence[SequenceWork]) -> None:
        for at, one in enumerate(work):
            end = one.start + len(one.tokens)
            if not one.tokens or one.start < 0 or end > self.config.max_positions:
                raise WorkError(
                    f"work {at}: positions {one.start} to {end - 1}; a step computes at least one, all below"
                    f" {self.config.max_positions}"
                )
            if len(one.pages) * PAGE_TOKENS < end:
                raise WorkError(
                    f"work {at}: {len(one.pages)} pages do not cover the {end} positions up to its last token"
                )
            if min(one.tokens) < 0 or max(one.tokens) >= self.config.vocabulary:
                raise WorkError(
                    f"work {at}: token ids {min(one.tokens)} to {max(one.tokens)}; the vocabulary has"
                    f" {self.config.vocabulary}"
                )
            if min(one.pages) < 0 or max(one.pages) >= self.kv_pages:
                raise WorkError(
                    f"work {at}: pages {min(one.pages)} to {max(one.pages)}; there are {self.kv_pages}"
                )


def _group_rows(config: Qwen3MoeConfig, dtype: torch.dtype, ranks: int, parts: int) -> int:
    """Return the minimum rows of every product, of a whole matrix or a rank's part. parts: of an expert."""
    of_head = min(config.heads * config.head_dim, config.vocabulary) // ranks
    narrowest = min(config.expert_intermediate // parts, config.experts, config.head_dim, max(1, of_head))
    return least_rows(dtype, config.hidden * narrowest)


def _check_attention(placement: Placement, shape: ModelShape) -> None:
    """Raise ValueError when a model of this shape cannot be computed with the attention of a placement."""
    if placement.attention == "dp":
        return
    reason = tp_refusal(shape, placement.ranks) if placement.sharded else "its layers must be sharded"
    if reason:
        raise ValueError(f"runner: {placement!r} with tensor-parallel attention cannot be computed: {reason}")


def _check_adoption(served: Placement, proposed: Placement, cells: NDArray[np.int32], arena: Arena) -> None:
    """ValueError when an engine that serves one placement cannot switch to the other, or not with these of
    its cells."""
    one, other = ((each.layers, each.experts, each.ranks, each.slots_per_rank) for each in (served, proposed))
    if one != other:
        raise ValueError(
            f"runner: {proposed!r} cannot follow {served!r}; it must have the same layers, experts, ranks and"
            " slots"
        )
    _check_attention(proposed, arena.shape)
    if proposed.sharded and arena.parts != proposed.ranks:
        reason = unshardable(arena.shape, proposed.ranks, arena.ballast_bytes)
        raise ValueError(f"runner: layers {list(proposed.sharded)} cannot be sharded: {reason}")
    shape = (served.layers, served.slots_per_rank)
    if cells.shape != shape or cells.dtype != np.int32:
        raise ValueError(
            f"runner: cells are {cells.dtype} {cells.shape}; expected int32 {shape}, one per slot"
        )
    if cells.min() < 0 or cells.max() >= arena.cells or np.bincount(cells.ravel()).max() > 1:
        raise ValueError(
            f"runner: every slot needs a cell of its own, from 0 to {arena.cells - 1}; given were"
            f" {cells.tolist()}"
        )
