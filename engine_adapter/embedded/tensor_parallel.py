"""Tensor-parallel attention: what a rank computes of every token, and the sums over the ranks.

All ranks compute the same tokens, each with its query heads and its head group, with its part of every
expert, and with its rows of the output matrix. What they find is gathered and added in rank order in fp32 on
every rank, so hidden states have the same bits on all of them. A row's bits do not depend on the rest of the
batch, as in `engine_adapter.embedded.dispatch`.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from engine_adapter.embedded.attention import Attention
from engine_adapter.embedded.dispatch import (
    Calls,
    CapacityError,
    Gathered,
    GatherHandle,
    check_experts,
    sorted_by_expert,
)
from engine_adapter.embedded.kernels.row_operations import product
from engine_adapter.embedded.step_sync import RankGroup, StepMismatch, bytes_of
from engine_adapter.kv_switch.kv_state import group_of_rank
from fleet.layout import head_groups


def part_of_attention(whole: Attention, rank: int, ranks: int) -> Attention:
    """Return a rank's part of attention: its query heads, and the KV heads of its head group. A view, no
    copy. The outputs of all ranks add up to those of the whole. ValueError when heads do not divide."""
    groups = head_groups(ranks, whole.kv_heads)
    heads, kv_heads = whole.heads // ranks, whole.kv_heads // groups
    group = group_of_rank(rank, ranks, groups)
    return whole.part(
        slice(rank * heads, (rank + 1) * heads),
        slice(group * kv_heads, (group + 1) * kv_heads),
        biased=rank == 0,
    )


class TensorParallel:
    """One rank's side of the sums of a step (`dispatch.PartExchange`). All ranks make the same calls with the
    same tokens. PeerLost, PeerTimeout as `RankGroup`."""

    def __init__(
        self,
        group: RankGroup,
        head: torch.Tensor,
        *,
        experts: int,
        max_tokens: int,
        group_rows: int,
        check_digest: bool = False,
    ) -> None:
        """head: [vocabulary, H], of which this rank takes a part of the rows. experts: of a layer.
        max_tokens: limit on the tokens of one rank in one step; all ranks together compute as many times
        that. group_rows: minimum rows of a non-empty group. check_digest: compare hidden states after every
        step."""
        self._group = group
        self._experts = experts
        self._max_tokens = max_tokens * group.ranks
        self._group_rows = group_rows
        self._check_digest = check_digest
        bounds = [len(head) * rank // group.ranks for rank in range(group.ranks + 1)]
        self._head = head[bounds[group.rank] : bounds[group.rank + 1]]
        self._outputs = [int(count) for count in np.diff(bounds)]
        """Rows of the output matrix that each rank takes."""
        self._calls = Calls()
        self._link_seconds = 0.0

    def begin_step(self, tokens: int) -> None:
        """CapacityError when there are too many tokens."""
        if tokens > self._max_tokens:
            raise CapacityError(
                f"tensor parallel: {tokens} tokens in a step, {self._max_tokens} are allowed; raise"
                " max_tokens or send smaller chunks"
            )

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        """Add up what the ranks computed, [tokens, H] each, in rank order: fp32 [tokens, H]."""
        found = self._gathered(mine)
        total = found[0].to(torch.float32)
        for rank in range(1, self._group.ranks):
            total += found[rank]
        return total

    def gather(self, x: torch.Tensor, experts: NDArray[Any], weights: torch.Tensor) -> Gathered:
        check_experts(experts, self._experts)
        return sorted_by_expert(x, experts, weights, self._experts, self._group_rows, self._calls.next())

    def reduce(self, results: torch.Tensor, handle: GatherHandle) -> torch.Tensor:
        self._calls.close(handle)
        return self.total(handle.weighted(results))

    def logits(self, normed: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits [count, vocabulary] of the first rows of normed [rows >= count, H]."""
        mine = product(normed, self._head)[:count]
        # A collective gathers equal shapes, so a rank with fewer outputs pads them.
        found = self._gathered(F.pad(mine, (0, max(self._outputs) - mine.shape[1])))
        return torch.cat(
            [part[:, :outputs] for part, outputs in zip(found, self._outputs, strict=True)], dim=1
        )

    def end_step(self, hidden: torch.Tensor) -> None:
        """Compare the hidden states [tokens, H] of the ranks, if so configured. StepMismatch when they
        differ."""
        if not self._check_digest:
            return
        mine = xxh3_64_intdigest(bytes_of(hidden).numpy().tobytes()) >> 1
        digests = self._group.all_gather(torch.tensor([mine])).view(-1).tolist()
        if any(other != mine for other in digests):
            raise StepMismatch(
                f"tensor parallel: the ranks computed different hidden states, with digests {digests}; the"
                " engine must be restarted"
            )

    def slow_links(self, seconds: float) -> None:
        """Emulate slow links as `Dispatch.slow_links`: a sum sends every token to every other rank, and
        nothing back."""
        self._link_seconds = seconds

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather [rows, n] of every rank: [ranks, rows, n]."""
        if self._link_seconds:
            self._group.wait(self._link_seconds / 2 * len(mine) * (self._group.ranks - 1))
        return self._group.all_gather(mine)
