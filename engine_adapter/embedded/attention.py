"""Grouped-query attention with normalized queries and keys and rotary positions (half-rotation), over a paged
KV cache.

KV layout: rows [page tokens, head_dim], each with keys or values of one head, page and layer
(`engine_adapter.embedded.kv_pool`). A page's rows are found by their numbers, K heads before V heads. With
pages inside heads, one gather per layer produces the operands of batched matrix products without another
copy.

Decoding sequences (one token each) are computed together. A chunk of several tokens is computed alone. A
row's bits do not depend on the other sequences of the batch, but on the length of its own chunk. Padding
positions have a weight of exactly zero. Values are summed over fixed spans of `SPAN_PAGES`, because BLAS
splits longer sums depending on their length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine_adapter.embedded.checkpoint import Qwen3MoeConfig
from engine_adapter.embedded.kernels.row_operations import compiled_loops, product
from engine_adapter.embedded.paged_attention import PAGE_TOKENS, PagedPlan, SequenceSpan, attend, plan_pages
from fleet.arrays import IntArray

SPAN_PAGES = 8
"""Pages whose values are summed by one product."""
_SMALL_PRODUCT = 400
"""Multiplications below which torch computes the products of a batch by a kernel of its own, which adds in
another order than BLAS does."""
_SPLIT_SAVES_PAGES = 64
"""Number of padding pages (per layer and head) that cost as much as one more batch."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences that compute one token each, padded to the same number of pages."""

    rows: torch.Tensor | None
    """int64 [B]: rows of the sequences among the step's tokens. None: the first B rows, in order."""
    count: int
    kv_rows: torch.Tensor
    """int64 [2 * kv_heads * B * pages per sequence]: by head, sequence and page. Shorter sequences are padded
    with their own first page."""
    mask: torch.Tensor
    """[kv_heads * B, 1, positions]: 0 for positions to attend to, -inf beyond."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence that computes several tokens."""

    begin: int
    end: int
    """End of the sequence's rows among the step's tokens."""
    kv_rows: torch.Tensor
    """int64 [2 * kv_heads * pages]: by head and page."""
    mask: torch.Tensor
    """[tokens, positions of those pages]: 0 where a token may attend, -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Inputs of attention that are the same for every layer of a step."""

    cos: torch.Tensor
    sin: torch.Tensor
    """[rows, 1, head_dim], the first half of the sine negated."""
    cells: torch.Tensor
    """int64 [tokens * 2 * kv_heads]: row * page_tokens + offset of each token's keys and values."""
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


class Rotary:
    """Cosines and signed sines of every position, [max positions, head_dim]."""

    def __init__(self, config: Qwen3MoeConfig, dtype: torch.dtype) -> None:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_positions, dtype=torch.float32), 1.0 / config.rope_theta**half
        )
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of int64 [n] positions, each [n, 1, head_dim]."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(
            0, positions
        ).unsqueeze(1)

    @property
    def nbytes(self) -> int:
        """Memory of the tables in bytes."""
        return self.cos.nbytes + self.sin.nbytes


def plan_attention(
    spans: Sequence[SequenceSpan], rows: int, page_rows: IntArray, page_tokens: int, rotary: Rotary
) -> AttentionPlan | PagedPlan:
    """Prepare a step over the tokens of `spans`, in order, padded to `rows` rows. page_rows: int64 [2 *
    kv_heads, pages], the KV rows of every page (`kv_pool.PageTable.rows`)."""
    loops = compiled_loops(rotary.cos.dtype)
    if loops is not None and page_tokens == PAGE_TOKENS:
        return plan_pages(loops, spans, page_rows, rotary)
    positions = np.zeros(rows, np.int64)
    page_of_token = np.empty(sum(span.tokens for span in spans), np.int64)
    chunks: list[Chunk] = []
    single: list[SequenceSpan] = []
    single_rows: list[int] = []
    begin = 0
    for span in spans:
        if span.tokens == 1:
            positions[begin] = span.start
            page_of_token[begin] = span.pages[span.start // page_tokens]
            single.append(span)
            single_rows.append(begin)
        else:
            here = np.arange(span.start, span.start + span.tokens)
            positions[begin : begin + span.tokens] = here
            page_of_token[begin : begin + span.tokens] = np.asarray(span.pages, np.int64)[here // page_tokens]
            chunks.append(_chunk(span, begin, page_rows, page_tokens, rotary.cos.dtype))
        begin += span.tokens
    decodes = (
        tuple(_decodes(single, np.array(single_rows), page_rows, page_tokens, rotary.cos)) if single else ()
    )
    cells = page_rows.T[page_of_token] * page_tokens + positions[:begin, None] % page_tokens
    return AttentionPlan(
        *rotary.at(torch.from_numpy(positions)), torch.from_numpy(cells.ravel()), decodes, tuple(chunks)
    )


def _page_count(span: SequenceSpan, page_tokens: int) -> int:
    return (span.start + span.tokens - 1) // page_tokens + 1


def _rows_of(pages: Sequence[int] | IntArray, page_rows: IntArray) -> torch.Tensor:
    """KV rows of pages, by head, then in the order of the pages: int64 [2 * kv_heads * pages]."""
    return torch.from_numpy(page_rows.take(pages, axis=1).ravel())


def _chunk(
    span: SequenceSpan, begin: int, page_rows: IntArray, page_tokens: int, dtype: torch.dtype
) -> Chunk:
    count = _page_count(span, page_tokens)
    mask = torch.full((span.tokens, count * page_tokens), -torch.inf, dtype=dtype).triu_(span.start + 1)
    return Chunk(begin, begin + span.tokens, _rows_of(span.pages[:count], page_rows), mask)


def _decodes(
    spans: Sequence[SequenceSpan],
    rows: NDArray[np.int64],
    page_rows: IntArray,
    page_tokens: int,
    rotary: torch.Tensor,
) -> Iterator[Decodes]:
    """rotary: [positions, head_dim], of the dtype of attention."""
    least_pages = -(-_SMALL_PRODUCT // (page_tokens * rotary.shape[1]))
    counts = np.array([_page_count(span, page_tokens) for span in spans], np.int64)
    groups = (
        [np.arange(len(spans))]
        if counts.max() - counts.min() <= SPAN_PAGES
        else list(_groups(np.argsort(counts, kind="stable"), counts))
    )
    for group in groups:
        width = max(int(counts[group].max()), least_pages)
        members = [spans[sequence] for sequence in group.tolist()]
        # Padded with the sequence's own page, so that it never reads another's values, not even to multiply
        # them by zero.
        table = [
            [*span.pages[:count], *[span.pages[0]] * (width - count)]
            for span, count in zip(members, counts[group].tolist(), strict=True)
        ]
        last = torch.tensor([span.start for span in members]).unsqueeze(1)
        mask = torch.zeros((len(members), width * page_tokens), dtype=rotary.dtype).masked_fill_(
            torch.arange(width * page_tokens) > last, -torch.inf
        )
        mask = mask.repeat(len(page_rows) // 2, 1).unsqueeze(1)
        kv_rows = _rows_of(np.array(table).ravel(), page_rows)
        in_order = np.array_equal(rows[group], np.arange(len(members)))
        yield Decodes(None if in_order else torch.from_numpy(rows[group]), len(members), kv_rows, mask)


def _groups(order: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split sequences, sorted by pages, into batches where that saves more padding than another batch
    costs."""
    sizes = counts[order]
    saved = np.arange(1, len(order)) * (sizes[-1] - sizes[:-1])
    if not len(saved) or saved.max() <= _SPLIT_SAVES_PAGES:
        yield order
        return
    cut = int(saved.argmax()) + 1
    yield from _groups(order[:cut], counts)
    yield from _groups(order[cut:], counts)


class Projection(NamedTuple):
    """A linear map. A product with rows [n, inputs] gives [n, outputs]."""

    weight: torch.Tensor
    """[outputs, inputs]. The inputs of an output are contiguous."""
    bias: torch.Tensor | None
    """[outputs]."""

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [n, inputs] to [n, outputs]."""
        return product(rows, self.weight, self.bias)

    def outputs(self, taken: slice) -> "Projection":
        """Return the map to some of the outputs, a view."""
        return Projection(self.weight[taken], None if self.bias is None else self.bias[taken])

    @property
    def nbytes(self) -> int:
        """Memory of the weights in bytes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention weights of one layer, or of some of its heads. Hq query heads, Hk KV heads, D values each."""

    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    qkv: tuple[Projection, ...]
    """H inputs. Together (Hq + 2 Hk) * D outputs: queries, keys, values. One projection of all heads of the
    layer, or three of some heads."""
    qk_norm: torch.Tensor
    """[Hq + Hk, D]: norm weights of every query and key head."""
    out: Projection
    """Hq * D inputs, H outputs."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights in bytes."""
        return sum(one.nbytes for one in self.qkv) + self.qk_norm.nbytes + self.out.nbytes

    def part(self, heads: slice, kv_heads: slice, *, biased: bool) -> "Attention":
        """Return the attention of some query heads and of the KV heads that they need. A view, no copy. The
        outputs of parts that have all query heads add up to those of the layer if one of them is biased."""
        (qkv,) = self.qkv
        size = self.head_dim

        def rows(taken: slice, first_head: int = 0) -> slice:
            return slice((first_head + taken.start) * size, (first_head + taken.stop) * size)

        return Attention(
            heads=heads.stop - heads.start,
            kv_heads=kv_heads.stop - kv_heads.start,
            head_dim=size,
            rms_eps=self.rms_eps,
            qkv=(
                qkv.outputs(rows(heads)),
                qkv.outputs(rows(kv_heads, self.heads)),
                qkv.outputs(rows(kv_heads, self.heads + self.kv_heads)),
            ),
            # The weights of all query heads are the same, and those of all key heads.
            qk_norm=self.qk_norm[
                self.heads - (heads.stop - heads.start) : self.heads + (kv_heads.stop - kv_heads.start)
            ],
            out=Projection(self.out.weight[:, rows(heads)], self.out.bias if biased else None),
        )

    def forward(
        self, hidden: torch.Tensor, plan: AttentionPlan | PagedPlan, kv: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention for hidden [rows, H] and return [rows, H]. Writes the tokens' keys and values
        into kv [KV rows, page tokens, D] first."""
        projected = [one.product(hidden) for one in self.qkv]
        qkv = projected[0] if len(projected) == 1 else torch.cat(projected, dim=1)
        mixed = attend(self, qkv, plan, kv) if isinstance(plan, PagedPlan) else self._attend(qkv, plan, kv)
        return self.out.product(mixed)

    def _attend(self, qkv: torch.Tensor, plan: AttentionPlan, kv: torch.Tensor) -> torch.Tensor:
        """Do what `paged_attention.attend` does, for qkv [rows, (Hq + 2 Hk) * D], by torch."""
        qkv = qkv.view(len(qkv), self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = self.heads + self.kv_heads
        qk = F.rms_norm(qkv[:, :rotated], (self.head_dim,), None, self.rms_eps).mul_(self.qk_norm)
        torch.addcmul(qk * plan.cos, qk.roll(self.head_dim // 2, dims=-1), plan.sin, out=qkv[:, :rotated])
        tokens = len(plan.cells) // (2 * self.kv_heads)
        kv.view(-1, self.head_dim).index_copy_(
            0, plan.cells, qkv[:tokens, self.heads :].reshape(-1, self.head_dim)
        )
        return self._mix(qkv[:, : self.heads], plan, kv)

    def _mix(self, queries: torch.Tensor, plan: AttentionPlan, kv: torch.Tensor) -> torch.Tensor:
        """Attend with queries [rows, Hq, D] and return [rows, Hq * D]."""
        if (
            not plan.chunks
            and len(plan.decodes) == 1
            and plan.decodes[0].rows is None
            and plan.decodes[0].count == len(queries)
        ):
            return self._decode(queries, plan.decodes[0], kv)
        mixed = queries.new_zeros((len(queries), self.heads * self.head_dim))
        for batch in plan.decodes:
            if batch.rows is None:
                mixed[: batch.count] = self._decode(queries[: batch.count], batch, kv)
            else:
                mixed[batch.rows] = self._decode(queries.index_select(0, batch.rows), batch, kv)
        for chunk in plan.chunks:
            mixed[chunk.begin : chunk.end] = self._prefill(queries[chunk.begin : chunk.end], chunk, kv)
        return mixed

    def _gather(self, kv_rows: torch.Tensor, sequences: int, kv: torch.Tensor) -> torch.Tensor:
        """Gather keys and values, [2, Hk * sequences, positions, D], from the rows of equally long
        sequences."""
        found = kv.flatten(1).index_select(0, kv_rows)
        return found.view(2, self.kv_heads * sequences, -1, self.head_dim)

    def _decode(self, queries: torch.Tensor, batch: Decodes, kv: torch.Tensor) -> torch.Tensor:
        """Attend with queries [B, Hq, D] of decoding sequences and return [B, Hq * D]."""
        keys, values = self._gather(batch.kv_rows, batch.count, kv)
        span = SPAN_PAGES * kv.shape[1]
        grouped = (
            queries.view(batch.count, self.kv_heads, -1, self.head_dim)
            .transpose(0, 1)
            .reshape(self.kv_heads * batch.count, -1, self.head_dim)
        )
        scores = torch.baddbmm(batch.mask, grouped, keys.transpose(1, 2), alpha=self.head_dim**-0.5)
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(weights[..., :span], values[:, :span])
        for begin in range(span, values.shape[1], span):
            mixed.baddbmm_(weights[..., begin : begin + span], values[:, begin : begin + span])
        return mixed.view(self.kv_heads, batch.count, -1).transpose(0, 1).reshape(batch.count, -1)

    def _prefill(self, queries: torch.Tensor, chunk: Chunk, kv: torch.Tensor) -> torch.Tensor:
        """Attend with queries [tokens, Hq, D] of one chunk and return [tokens, Hq * D]."""
        keys, values = self._gather(chunk.kv_rows, 1, kv).unsqueeze(2)
        grouped = queries.view(len(queries), self.kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        share = grouped.shape[1]
        mixed = F.scaled_dot_product_attention(
            grouped, keys.expand(-1, share, -1, -1), values.expand(-1, share, -1, -1), attn_mask=chunk.mask
        )
        return mixed.permute(2, 0, 1, 3).reshape(len(queries), -1)
