"""Tensor-parallel attention computes what transformers computes, with fewer KV heads than ranks, as many, and
more, also behind KV that was computed under data-parallel attention, and back. All ranks find the same bits,
which do not depend on the batch."""

import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from engine_adapter.embedded.checkpoint import Checkpoint, read_config
from engine_adapter.embedded.dispatch import CapacityError
from engine_adapter.embedded.model_runner import Forward, ModelRunner, SequenceWork
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from engine_adapter.embedded.step_sync import RankGroup, StepMismatch
from engine_adapter.kv_switch.kv_state import group_of_rank
from fleet.layout import AttentionKind
from fleet.placement import linear, with_attention, with_rows
from tests.engine_adapter.rank_threads import RankThreads, rank_threads

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
BYTES = (Path(__file__).parents[3] / "LICENSE").read_bytes()
write_tiny = runpy.run_path(str(Path(__file__).parents[1] / "tiny_models.py"))["write_tiny"]
PAGES = 64
TOLERANCE = 1e-4
"""of fp32 logits: the same products, added in another order"""
SHAPES = [
    (2, {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    (2, {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}),
    (2, {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}),
    (4, {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True}),
    (4, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    (4, {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    (4, {"num_attention_heads": 8, "num_key_value_heads": 8}),
]
"""Ranks, and what differs from the tiny model: fewer KV heads than ranks, as many, and more."""


def random_shape(seed: int) -> tuple[int, dict[str, Any]]:
    """Ranks and changes of the tiny model, as in `SHAPES`."""
    random = np.random.default_rng(seed)
    ranks = int(random.choice([2, 4]))
    kv_heads = int(random.choice([count for count in (1, 2, 4, 8) if count <= 2 * ranks]))
    return ranks, {
        "num_attention_heads": max(ranks, kv_heads) * int(random.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": int(random.choice([8, 16, 24, 32])),
        "hidden_size": int(random.choice([32, 48, 96])),
        "vocab_size": int(random.integers(61, 90)),
        "num_experts": int(random.integers(4, 12)),
        "attention_bias": bool(random.integers(2)),
        "tie_word_embeddings": bool(random.integers(2)),
    }


@dataclass
class Forced:
    """A text whose tokens are given."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """behind a position"""

    def work(self, count: int) -> SequenceWork:
        return SequenceWork(
            self.tokens[self.computed : self.computed + count], self.computed, self.pages, needs_logits=True
        )

    @property
    def length(self) -> int:
        """Pages of the whole text."""
        return -(-len(self.tokens) // PAGE_TOKENS)


class Served:
    """Ranks that serve one attention after the other. A page of tensor-parallel attention is the unit of the
    same number on every rank."""

    def __init__(self, threads: RankThreads, folder: Path, **settings: Any) -> None:
        self.threads = threads
        config = read_config(folder)
        placement = linear(layers=config.layers, experts=config.experts, ranks=threads.ranks)
        self.placement = with_rows(placement, dict.fromkeys(range(config.layers)), epoch=0)
        settings = {"kv_pages": PAGES, "check_digest": True} | settings
        self.runners = threads.load(folder, self.placement, **settings)
        self.groups = self.runners[0].kv_pool.groups

    def adopt(self, attention: AttentionKind) -> None:
        self.placement = with_attention(self.placement, attention, epoch=self.placement.epoch + 1)

        def adopted(rank: int) -> None:
            runner = self.runners[rank]
            runner.adopt(runner.prepare(self.placement, runner.cells))
            runner.adopt_kv(runner.kv_pool.first_units(self.groups if attention == "dp" else 1))

        self.threads.each(adopted)

    def forward(self, works: Sequence[Sequence[SequenceWork]]) -> list[Forward]:
        return self.threads.each(lambda rank: self.runners[rank].forward(works[rank]))

    def step_apart(self, texts: Sequence[Sequence[Forced]], count: int) -> None:
        """Compute the next tokens of the texts of each rank, under data-parallel attention."""
        found = self.forward([[one.work(count) for one in mine] for mine in texts])
        for mine, forward in zip(texts, found, strict=True):
            taken(mine, count, forward)

    def step_together(self, texts: Sequence[Forced], count: int) -> None:
        """Compute the next tokens of all texts, under tensor-parallel attention."""
        found = self.forward([[one.work(count) for one in texts]] * self.threads.ranks)
        for other in found[1:]:
            assert torch.equal(other.logits, found[0].logits)
            assert np.array_equal(other.routed, found[0].routed)
        taken(texts, count, found[0])

    def unit(self, rank: int, page: int, group: int) -> NDArray[np.uint8]:
        """Memory of a page of data-parallel attention."""
        return self.runners[rank].kv_pool.unit(page * self.groups + group)

    def merge(self, rank: int, text: Forced, pages: list[int]) -> None:
        """Copy the pages of a rank's text into pages of tensor-parallel attention."""
        for old, new in zip(text.pages, pages, strict=True):
            for reader, runner in enumerate(self.runners):
                group = group_of_rank(reader, self.threads.ranks, self.groups)
                runner.kv_pool.unit(new)[:] = self.unit(rank, old, group)
        text.pages = pages

    def split(self, rank: int, text: Forced, pages: list[int]) -> None:
        """Copy the pages of a text into pages of data-parallel attention of a rank, each group from the last
        rank that has it."""
        for old, new in zip(text.pages, pages, strict=True):
            for reader, runner in enumerate(self.runners):
                group = group_of_rank(reader, self.threads.ranks, self.groups)
                self.unit(rank, new, group)[:] = runner.kv_pool.unit(old)
        text.pages = pages


def taken(texts: Sequence[Forced], count: int, forward: Forward) -> None:
    for text, row in zip(texts, forward.logits.numpy(), strict=True):
        text.computed += count
        text.logits[text.computed - 1] = row.copy()


def texts_of(vocabulary: int, *lengths: int) -> list[Forced]:
    return [
        Forced([byte % vocabulary for byte in BYTES[at * 500 : at * 500 + length]])
        for at, length in enumerate(lengths)
    ]


def placed(texts: Sequence[Forced], first: int = 0, seed: int = 1) -> list[list[int]]:
    """Pages for the texts, in random order, from page `first` on."""
    count = sum(text.length for text in texts)
    free = iter((first + np.random.default_rng(seed).permutation(count)).tolist())
    return [[next(free) for _ in range(text.length)] for text in texts]


def give_pages(texts: Sequence[Forced]) -> None:
    for text, pages in zip(texts, placed(texts), strict=True):
        text.pages = pages


def furthest(text: Forced, model: Any) -> float:
    """Largest difference of the text's logits to those of transformers."""
    with torch.inference_mode():
        known = model(torch.tensor([text.tokens])).logits[0].numpy()
    return max(float(np.abs(row - known[at]).max()) for at, row in text.logits.items())


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankThreads]]:
    """Ranks that have met, by their number."""
    with (
        rank_threads(tmp_path_factory.mktemp("one"), 1) as one,
        rank_threads(tmp_path_factory.mktemp("two"), 2) as two,
        rank_threads(tmp_path_factory.mktemp("four"), 4) as four,
    ):
        yield {1: one, 2: two, 4: four}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_computes_what_transformers_computes(threads: dict[int, RankThreads], ranks: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    served = Served(threads[ranks], DEMO)
    served.adopt("tp")
    texts = texts_of(256, 40, 26, 58, 90)
    give_pages(texts)
    served.step_together(texts[:2], 9)
    served.step_together(texts[2:], 33)
    for _ in range(17):
        served.step_together(texts, 1)
    served.step_together(texts[3:], 40)
    for text in texts:
        assert furthest(text, model) < TOLERANCE


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [*SHAPES, *(pytest.param(*random_shape(seed), marks=pytest.mark.slow) for seed in range(40))],
)
def test_kv_of_one_attention_serves_the_other(
    threads: dict[int, RankThreads], tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    """Texts begin under data-parallel attention, continue under tensor-parallel attention and end on another
    rank, with a page that is partly filled at both switches."""
    model = write_tiny(tmp_path, **changes)
    served = Served(threads[ranks], tmp_path)
    texts = texts_of(61, *[47, 61, 33, 70, 55][: ranks + 1])
    give_pages(texts)
    mine = [texts[rank::ranks] for rank in range(ranks)]
    served.step_apart(mine, 21)
    for _ in range(3):
        served.step_apart(mine, 1)
    served.adopt("tp")
    for rank, own in enumerate(mine):
        for text, pages in zip(own, placed(own, first=PAGES // 2 * served.groups + 8 * rank), strict=True):
            served.merge(rank, text, pages)
    served.step_together(texts[1:3], 4)
    for _ in range(4):
        served.step_together(texts, 1)
    served.adopt("dp")
    moved = [mine[rank - 1] for rank in range(ranks)]
    for rank, own in enumerate(moved):
        for text, pages in zip(own, placed(own, seed=2), strict=True):
            served.split(rank, text, pages)
    served.step_apart(moved, 1)
    for text in texts:
        assert furthest(text, model) < TOLERANCE
        assert len(text.logits) >= 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "changes"), [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[6]])
def test_a_rows_bits_do_not_depend_on_its_batch(
    threads: dict[int, RankThreads], tmp_path: Path, ranks: int, changes: dict[str, Any], dtype: str
) -> None:
    write_tiny(tmp_path, **changes)
    served = Served(threads[ranks], tmp_path, dtype=dtype)
    served.adopt("tp")
    texts = texts_of(61, 2, 18, 40, 50, 17, 33, 65, 90, 160)
    give_pages(texts)
    for text in texts:
        served.forward([[SequenceWork(text.tokens[:-1], 0, text.pages, needs_logits=False)]] * ranks)
    prompt = Forced(list(range(1, 38)), [PAGES - 1, PAGES - 2, PAGES - 3])
    works = [
        *(
            SequenceWork(text.tokens[-1:], len(text.tokens) - 1, text.pages, needs_logits=True)
            for text in texts
        ),
        SequenceWork(prompt.tokens, 0, prompt.pages, needs_logits=True),
    ]
    alone = torch.cat([served.forward([[work]] * ranks)[0].logits for work in works])
    for order in (range(10), range(9, -1, -1), [3, 7, 1], [9, 2], [0, 1, 2, 3, 4, 5]):
        together = served.forward([[works[at] for at in order]] * ranks)
        assert torch.equal(together[ranks - 1].logits, alone[list(order)])


def test_short_numbers_stay_near(threads: dict[int, RankThreads], tmp_path: Path) -> None:
    model = write_tiny(tmp_path, num_key_value_heads=4)
    served = Served(threads[2], tmp_path, dtype="bfloat16")
    texts = texts_of(61, 40, 30)
    give_pages(texts)
    served.adopt("tp")
    served.step_together(texts, 30)
    known = Served(threads[2], tmp_path, dtype="bfloat16")
    apart = texts_of(61, 40, 30)
    give_pages(apart)
    known.step_apart([apart[:1], apart[1:]], 30)
    assert max(furthest(text, model) for text in texts) < 2 * max(furthest(text, model) for text in apart)


class Backwards(RankGroup):
    """A rank that gathers the others in the wrong order."""

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        found = super().all_gather(mine)
        return found.flip(0) if mine.dtype == torch.float32 else found


@pytest.mark.parametrize("wrong", [None, 2])
def test_a_rank_that_adds_in_another_order_is_noticed(tmp_path: Path, wrong: int | None) -> None:
    meeting, folder = tmp_path / "meeting", tmp_path / "model"
    meeting.mkdir()
    write_tiny(folder, num_attention_heads=4)
    with rank_threads(tmp_path, 4) as threads:
        config = read_config(folder)
        whole = linear(layers=config.layers, experts=config.experts, ranks=4)
        sharded = with_rows(whole, dict.fromkeys(range(config.layers)), epoch=0)
        placement = with_attention(sharded, "tp", epoch=1)

        def found(rank: int) -> str:
            group = (Backwards if rank == wrong else RankGroup)(meeting, rank, 4)
            with Checkpoint(folder) as checkpoint:
                runner = ModelRunner(
                    checkpoint, placement, rank=rank, group=group, kv_pages=4, check_digest=True
                )
            try:
                runner.forward([SequenceWork(list(range(30)), 0, [1, 3], needs_logits=False)])
            except StepMismatch as error:
                return str(error)
            finally:
                group.all_gather(torch.zeros(1))  # Nobody leaves while another still needs it.
                group.close()
            return ""

        messages = threads.each(found)
    if wrong is None:
        assert messages == [""] * 4
    else:
        assert all("different hidden states" in message for message in messages)


def test_a_step_without_work_is_empty(threads: dict[int, RankThreads], tmp_path: Path) -> None:
    write_tiny(tmp_path)
    served = Served(threads[2], tmp_path)
    served.adopt("tp")
    for found in served.forward([[], []]):
        assert found.logits.shape == (0, 61)
        assert found.routed.shape == (0, 2, 2)


def test_an_engine_takes_as_many_tokens_and_pages_as_its_ranks_together(
    threads: dict[int, RankThreads], tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    served = Served(threads[2], tmp_path, max_tokens=16, kv_pages=3)
    served.adopt("tp")
    assert [runner.kv_pages for runner in served.runners] == [6, 6]
    works = [[SequenceWork([1] * 16, 0, [at], needs_logits=True) for at in (5, 0)]] * 2
    assert all(len(found.logits) == 2 for found in served.forward(works))
    with pytest.raises(CapacityError, match="33 tokens in a step, 32 are allowed"):
        served.runners[0].forward([SequenceWork([1] * 33, 0, [0, 1, 2], needs_logits=True)])


def test_a_page_table_of_the_other_attention_is_refused(
    threads: dict[int, RankThreads], tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    runner = Served(threads[2], tmp_path).runners[0]
    with pytest.raises(ValueError, match=r"expected int32 \[pages, 2\]"):
        runner.adopt_kv(runner.kv_pool.first_units(1))


@pytest.mark.parametrize(
    ("changes", "sharded", "message"),
    [
        ({}, False, "its layers must be sharded"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            True,
            "3 KV heads neither divide among 2 ranks",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            True,
            "3 attention heads do not divide among 2",
        ),
    ],
)
def test_attention_that_the_ranks_cannot_share_is_refused(
    threads: dict[int, RankThreads], tmp_path: Path, changes: dict[str, Any], sharded: bool, message: str
) -> None:
    write_tiny(tmp_path, **changes)
    before = linear(layers=2, experts=6, ranks=2)
    if sharded:
        before = with_rows(before, {0: None, 1: None}, epoch=0)
    runner = threads[2].load(tmp_path, before)[0]
    after = with_attention(before, "tp", epoch=1)
    with pytest.raises(ValueError, match=message):
        runner.prepare(after, runner.cells)
    assert runner.kv_units.shape == (256, 2 if not sharded else 1)
    with pytest.raises(ValueError, match=message):
        threads[2].load(tmp_path, after)
