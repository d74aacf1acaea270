"""Sharded layers compute what transformers computes, whichever layers of the demo model are sharded, on one
rank, two and four; and a text's bits depend on neither its batch nor its rank."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from engine_adapter.embedded.model_runner import ModelRunner
from fleet.placement import linear, with_rows
from tests.engine_adapter.rank_threads import RankThreads, Text, rank_threads

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
LAYERS, EXPERTS = 4, 32
SETS = list(chain.from_iterable(combinations(range(LAYERS), count) for count in range(LAYERS + 1)))
"""all 16 sets of layers"""
TOLERANCE = 1e-4
"""of fp32 logits, which reach 20 and differ by up to 2.1e-5: the same products, added in another order"""
SAFE_MARGIN = 1e-3
"""texts may part where the best logit leads by less than this"""
BYTES = (Path(__file__).parents[3] / "LICENSE").read_bytes()
FORCED = [list(BYTES[at * 700 : at * 700 + 60]) for at in range(6)]
STARTS = (1, 1, 9, 16, 33, 47)
"""tokens of each forced text that one step computes; the others follow one by one"""
PREFIXES = list(BYTES[5000:5040])
PROMPTS = [list(BYTES[at : at + length]) for at, length in ((120, 3), (1500, 30), (3000, 48), (7000, 64))]
FREE = 24
"""tokens that follow each of them"""
FAST = {(1, (0, 1, 2, 3)), (2, (0, 2)), (2, (0, 1, 2, 3)), (4, (1,))}
BIT_COUNT = 12
"""tokens that follow one by one where bits are compared"""


class Oracle:
    """transformers' logits."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # two threads wait for each other on a shared machine
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        model.set_experts_implementation("eager")
        self._model = model.eval()
        self.forced = [self.logits(text) for text in FORCED]
        self.prefixes = self.logits(PREFIXES)
        self.free = [self._continued(prompt) for prompt in PROMPTS]

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Behind each position: fp32 [positions, vocabulary]."""
        with torch.inference_mode():
            found: NDArray[np.float32] = self._model(torch.tensor([tokens])).logits[0].numpy()
        return found

    def _continued(self, prompt: list[int]) -> tuple[list[int], NDArray[np.float32]]:
        """The tokens that its greedy generation adds, and by how much each of them led: fp32 [FREE]."""
        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=FREE,
                do_sample=False,
                eos_token_id=None,
            )[0].tolist()
        best = np.sort(self.logits(found)[len(prompt) - 1 : -1], axis=1)
        return found[len(prompt) :], best[:, -1] - best[:, -2]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankThreads]]:
    """Ranks that have met, by their number."""
    with (
        rank_threads(tmp_path_factory.mktemp("one"), 1) as one,
        rank_threads(tmp_path_factory.mktemp("two"), 2) as two,
        rank_threads(tmp_path_factory.mktemp("four"), 4) as four,
    ):
        yield {1: one, 2: two, 4: four}


def loaded(threads: RankThreads, sharded: Sequence[int]) -> list[ModelRunner]:
    """Ranks that have loaded the demo model in one form."""
    placement = linear(layers=LAYERS, experts=EXPERTS, ranks=threads.ranks)
    return threads.load(DEMO, with_rows(placement, dict.fromkeys(sharded), epoch=0), kv_pages=512)


def forced_texts() -> list[Text]:
    return [
        Text(text[:start], len(text) - start + 1, text[start:])
        for text, start in zip(FORCED, STARTS, strict=True)
    ]


def dealt(texts: Sequence[Text], ranks: int, first: int = 0) -> list[list[Text]]:
    """The texts of each rank, dealt like cards."""
    return [list(texts[(rank - first) % ranks :: ranks]) for rank in range(ranks)]


def furthest(texts: Sequence[Text], oracle: Oracle) -> float:
    """Largest difference of a forced text's logits to the oracle's."""
    return max(
        float(np.abs(np.stack(text.logits) - known[start - 1 :]).max())
        for text, known, start in zip(texts, oracle.forced, STARTS, strict=True)
    )


@pytest.mark.parametrize(
    ("ranks", "sharded"),
    [
        pytest.param(ranks, sharded, marks=[] if (ranks, sharded) in FAST else pytest.mark.slow)
        for ranks in (1, 2, 4)
        for sharded in SETS
    ],
)
def test_every_form_computes_what_transformers_computes(
    oracle: Oracle,
    threads: dict[int, RankThreads],
    ranks: int,
    sharded: tuple[int, ...],
) -> None:
    runners = loaded(threads[ranks], sharded)
    forced = forced_texts()
    prefixes = [Text(PREFIXES[: end + 1], 1) for end in range(len(PREFIXES))]
    free = [Text(prompt, FREE) for prompt in PROMPTS]
    threads[ranks].compute(runners, dealt([*forced, *prefixes, *free], ranks))
    assert furthest(forced, oracle) < TOLERANCE
    assert np.abs(np.concatenate([text.logits for text in prefixes]) - oracle.prefixes).max() < TOLERANCE
    for text, (tokens, margins) in zip(free, oracle.free, strict=True):
        close = np.flatnonzero(margins < SAFE_MARGIN)
        end = int(close[0]) if len(close) else FREE
        assert text.chosen[:end] == tokens[:end]


def test_most_free_texts_are_compared_to_their_ends(oracle: Oracle) -> None:
    assert sum((margins >= SAFE_MARGIN).all() for _, margins in oracle.free) >= 3


def test_a_cut_across_gate_and_up_would_be_found(oracle: Oracle, threads: dict[int, RankThreads]) -> None:
    """The rows of gate and up as one matrix, cut into as many runs as there are ranks: rank 0 gets gate rows
    only. Turning back restores every byte, so that no round trip finds it."""
    two = threads[2]
    right, wrong = loaded(two, (2,)), loaded(two, (2,))
    placement = right[0].placement
    for expert in range(EXPERTS):
        group, piece = divmod(expert, 2)
        parts = [one.arena.part_gate_up(int(one.cells[2, group]), piece) for one in wrong]
        (gate_0, up_0), (gate_1, up_1) = (part.clone().chunk(2) for part in parts)
        parts[0].copy_(torch.cat([gate_0, gate_1]))
        parts[1].copy_(torch.cat([up_0, up_1]))
    found = []
    for runners in (right, wrong):
        texts = forced_texts()
        two.compute(runners, dealt(texts, 2))
        found.append(furthest(texts, oracle))
    assert placement.sharded == (2,)
    assert found[0] < TOLERANCE
    assert found[1] > 1000 * TOLERANCE


def short_texts() -> list[Text]:
    return [
        Text(text[:start], BIT_COUNT + 1, text[start : start + BIT_COUNT])
        for text, start in zip(FORCED, STARTS, strict=True)
    ]


@pytest.mark.parametrize(
    ("ranks", "sharded"),
    [
        (2, (0, 2)),
        pytest.param(2, (0, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(4, (1, 3), marks=pytest.mark.slow),
    ],
)
def test_a_texts_bits_depend_on_neither_its_batch_nor_its_rank(
    threads: dict[int, RankThreads], ranks: int, sharded: tuple[int, ...]
) -> None:
    runners = loaded(threads[ranks], sharded)

    def computed(rows: Sequence[Sequence[Text]]) -> None:
        threads[ranks].compute(runners, rows)

    together = short_texts()
    computed(dealt(together, ranks))
    for first in range(1, ranks):
        elsewhere = short_texts()
        computed(dealt(elsewhere, ranks, first))
        assert_same_bits(elsewhere, together)
    backwards = short_texts()
    computed([list(reversed(mine)) for mine in dealt(backwards, ranks)])
    assert_same_bits(backwards, together)
    for at, alone in enumerate(short_texts()):
        computed([[alone], *[[]] * (ranks - 1)])
        assert_same_bits([alone], [together[at]])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_where_whole_layers_lie_changes_no_bit_of_a_form(threads: dict[int, RankThreads], ranks: int) -> None:
    sharded = (0, 3)
    texts = short_texts()
    threads[ranks].compute(loaded(threads[ranks], sharded), dealt(texts, ranks))
    random = np.random.default_rng(4)
    slots = EXPERTS // ranks + 3
    table = linear(layers=LAYERS, experts=EXPERTS, ranks=ranks, slots_per_rank=slots)
    rows = {layer: random.permutation(table.expert_of_slot[layer]) for layer in range(LAYERS)}
    scattered = with_rows(table, rows | dict.fromkeys(sharded), epoch=0)
    again = short_texts()
    threads[ranks].compute(threads[ranks].load(DEMO, scattered, kv_pages=512), dealt(again, ranks))
    assert_same_bits(again, texts)


def assert_same_bits(found: Sequence[Text], known: Sequence[Text]) -> None:
    for one, other in zip(found, known, strict=True):
        assert np.array_equal(np.stack(one.logits), np.stack(other.logits))
