"""Attention by compiled loops is that of exact arithmetic, and a token's bits depend neither on its batch, nor on
its pages, nor on where its prompt is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.embedded import kernels
from engine_adapter.embedded.kernels import LayerLoops
from engine_adapter.embedded.paged_attention import PAGE_TOKENS, SequenceSpan, attend, plan_pages
from tests.engine_adapter.layer_forms import KINDS, computed_by

pytestmark = pytest.mark.skipif(not KINDS, reason=kernels.missing)
POSITIONS, PAGES = 200, 40


@pytest.fixture(params=KINDS, autouse=True, scope="module")
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with computed_by(request.param):
        yield request.param


@dataclass
class Case:
    """Weights of attention, rotary tables, and a KV memory for each user."""

    heads: int
    kv_heads: int
    head_dim: int
    seed: int
    rms_eps: float = 1e-6

    def __post_init__(self) -> None:
        self.qk_norm = self.normal(self.heads + self.kv_heads, self.head_dim)
        angles = self.normal(POSITIONS, self.head_dim // 2)
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=1)
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=1)
        self.page_rows = np.random.default_rng(self.seed).permutation(2 * self.kv_heads * PAGES)
        self.page_rows = self.page_rows.reshape(2 * self.kv_heads, PAGES)

    def normal(self, *shape: int) -> torch.Tensor:
        self.seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def tokens(self, count: int) -> torch.Tensor:
        return self.normal(count, (self.heads + 2 * self.kv_heads) * self.head_dim)

    def kv(self) -> torch.Tensor:
        return torch.full((2 * self.kv_heads * PAGES, PAGE_TOKENS, self.head_dim), 7.0)

    def attend(self, spans: Sequence[SequenceSpan], qkv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return attend(self, qkv.clone(), plan_pages(library(), spans, self.page_rows, self), kv)

    def exact(self, qkv: torch.Tensor) -> torch.Tensor:
        """All tokens of one sequence from position 0, in float64."""
        rotated, tokens = self.heads + self.kv_heads, len(qkv)
        all_heads = qkv.double().view(tokens, rotated + self.kv_heads, self.head_dim)
        qk = all_heads[:, :rotated]
        qk = qk / (qk.square().mean(dim=2, keepdim=True) + self.rms_eps).sqrt() * self.qk_norm.double()
        qk = qk * self.cos[:tokens, None].double() + qk.roll(self.head_dim // 2, 2) * self.sin[:tokens, None]
        share = self.heads // self.kv_heads
        keys = qk[:, self.heads :].repeat_interleave(share, dim=1)
        values = all_heads[:, rotated:].repeat_interleave(share, dim=1)
        scores = torch.einsum("qhd,khd->hqk", qk[:, : self.heads], keys) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), values).reshape(tokens, -1)


def library() -> LayerLoops:
    found = kernels.compiled()
    assert found is not None
    return found


CASES = st.builds(
    lambda share, kv_heads, half, seed: Case(share * kv_heads, kv_heads, 2 * half, seed),
    st.integers(1, 9),
    st.integers(1, 3),
    st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 64])),
    st.integers(0, 2**31),
)


@settings(deadline=None, max_examples=40)
@given(CASES, st.integers(1, POSITIONS))
def test_every_token_attends_to_itself_and_all_before(case: Case, length: int) -> None:
    qkv = case.tokens(length)
    pages = np.random.default_rng(case.seed).permutation(PAGES).tolist()
    found = case.attend([SequenceSpan(length, 0, pages)], qkv, case.kv())
    assert (found.double() - case.exact(qkv)).abs().max() < 1e-5


@settings(deadline=None, max_examples=40)
@given(CASES, st.lists(st.integers(1, 90), min_size=2, max_size=3), st.data())
def test_bits_depend_on_neither_batch_nor_pages_nor_cuts(
    case: Case, lengths: list[int], data: st.DataObject
) -> None:
    """Each text alone, in one piece, and all together in pieces, on other pages."""
    texts = [case.tokens(length) for length in lengths]
    alone = [case.attend([SequenceSpan(len(text), 0, range(PAGES))], text, case.kv()) for text in texts]
    kv, order = case.kv(), np.random.default_rng(case.seed).permutation(PAGES).tolist()
    pages = [order[at * 10 : at * 10 + 10] for at in range(len(texts))]
    done, found = [0] * len(texts), [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        pieces = [
            (which, data.draw(st.integers(1, len(text) - done[which])))
            for which, text in enumerate(texts)
            if done[which] < len(text)
        ]
        spans = [SequenceSpan(count, done[which], pages[which]) for which, count in pieces]
        qkv = torch.cat([texts[which][done[which] : done[which] + count] for which, count in pieces])
        results = case.attend(spans, qkv, kv).split([count for _, count in pieces])
        for (which, count), result in zip(pieces, results, strict=True):
            found[which].append(result)
            done[which] += count
    for one, other in zip(alone, found, strict=True):
        assert torch.equal(one, torch.cat(other))


def test_values_beyond_a_sequence_are_not_read(kind: str) -> None:
    """The rest of its last page may hold anything."""
    case = Case(8, 2, 32, 1)
    text, kv = case.tokens(21), case.kv()
    clean = case.attend([SequenceSpan(21, 0, range(PAGES))], text, kv)
    dirty = torch.full_like(kv, torch.nan)
    assert torch.equal(case.attend([SequenceSpan(21, 0, range(PAGES))], text, dirty), clean)
