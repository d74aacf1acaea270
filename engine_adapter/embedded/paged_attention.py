"""Attention of a step by compiled loops, which read keys and values where their pages are.

Tokens of prompts and of decoding sequences are computed alike, each alone over all earlier positions. So
a token's bits depend neither on the batch nor on where its prompt is cut into chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine_adapter.embedded.kernels import LayerLoops
from fleet.arrays import IntArray

PAGE_TOKENS = 16
"""Positions per KV page. Equal to the block size of block hashes, and to `PAGE` of the compiled loops."""


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence of a step: `tokens` tokens from position `start`, over `pages`."""

    tokens: int
    start: int
    pages: Sequence[int]


class RotaryTables(Protocol):
    """Cosines and signed sines of every position, contiguous [max positions, head_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor


class HeadWeights(Protocol):
    """Weights and sizes of attention between its products. See `attention.Attention`."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_eps(self) -> float: ...
    @property
    def qk_norm(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Inputs of attention that are the same for every layer of a step."""

    loops: LayerLoops
    rotary: RotaryTables
    positions: IntArray
    """int64 [tokens]"""
    first_page: IntArray
    """int64 [tokens]: the first page of each token's sequence, an index of page_rows."""
    page_rows: IntArray
    """int64 [pages of all sequences, 2 * kv_heads], contiguous: the KV rows of each page."""
    longest: int
    """Positions of the longest sequence."""


def plan_pages(
    loops: LayerLoops, spans: Sequence[SequenceSpan], page_rows: IntArray, rotary: RotaryTables
) -> PagedPlan:
    """Prepare a step over the tokens of `spans`, in order. page_rows: int64 [2 * kv_heads, pages], the KV
    rows of every page (`kv_pool.PageTable.rows`)."""
    tokens = np.array([span.tokens for span in spans], np.int64)
    starts = np.array([span.start for span in spans], np.int64)
    counts = (starts + tokens - 1) // PAGE_TOKENS + 1
    pages = list(
        chain.from_iterable(span.pages[:count] for span, count in zip(spans, counts.tolist(), strict=True))
    )
    first_token = tokens.cumsum() - tokens
    return PagedPlan(
        loops,
        rotary,
        np.arange(tokens.sum()) + (starts - first_token).repeat(tokens),
        (counts.cumsum() - counts).repeat(tokens),
        np.ascontiguousarray(page_rows.take(pages, axis=1).T),
        int((starts + tokens).max(initial=0)),
    )


def attend(weights: HeadWeights, qkv: torch.Tensor, plan: PagedPlan, kv: torch.Tensor) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values into kv [KV rows, PAGE_TOKENS, D], and
    attend. qkv: contiguous fp32 [tokens, (Hq + 2 Hk) * D], overwritten. Return [tokens, Hq * D]."""
    tokens, width = qkv.shape
    out = qkv.new_empty((tokens, weights.heads * weights.head_dim))
    plan.loops.attend(
        qkv.data_ptr(),
        width,
        kv.data_ptr(),
        out.data_ptr(),
        weights.qk_norm.data_ptr(),
        plan.rotary.cos.data_ptr(),
        plan.rotary.sin.data_ptr(),
        plan.positions.ctypes.data,
        plan.first_page.ctypes.data,
        plan.page_rows.ctypes.data,
        tokens,
        weights.heads,
        weights.kv_heads,
        weights.head_dim,
        plan.longest,
        weights.rms_eps,
    )
    return out
