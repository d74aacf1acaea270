"""Merging: one page for one hash, orders of requests and of eviction, and which units are read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.batching.kv_cache import Block, identify
from engine_adapter.kv_switch.kv_state import KvPage, KvState, OpenSequence, Switched
from engine_adapter.kv_switch.merging import merge
from tests.engine_adapter.kv_switch.kv_fixture import SIZE, SwitchableEngine


def chain_of(text: str) -> list[Block]:
    """Blocks of `SIZE` tokens, one per letter."""
    return identify([ord(letter) for letter in text for _ in range(SIZE)], SIZE)


def request(number: int, pages: list[int], *, rank: int = 0, registered: int = 0) -> OpenSequence:
    """A request that arrived at time `number` and has computed all of its pages."""
    return OpenSequence(
        rank=rank,
        number=number,
        arrived=number,
        request=b"",
        tokens=[0] * len(pages) * SIZE,
        max_new=5,
        computed=len(pages) * SIZE,
        generated=0,
        cached_tokens=0,
        admissions=1,
        salt="",
        registered=registered,
        collided=False,
        pages=pages,
    )


def rank_state(
    chains: list[list[Block]],
    *,
    kept: list[int],
    running: list[OpenSequence],
    free: int = 20,
    groups: int = 2,
) -> KvState:
    """State of a rank that has these chains registered, one after the other."""
    pages: list[KvPage] = []
    known: set[int] = set()
    for blocks in chains:
        parent: int | None = None
        for block in blocks:
            if block.block_hash not in known:
                first = len(pages) * groups
                pages.append(KvPage(tuple(range(first, first + groups)), block, parent))
                known.add(block.block_hash)
            parent = block.block_hash
    used = len(pages) * groups
    return KvState(pages, kept, running, [], [list(range(used, used + free))])


def merged(states: list[KvState], groups: int = 2) -> Switched:
    return merge(states, groups=groups, max_running=100, block_size=SIZE)


def hashes(state: KvState, pages: list[int]) -> list[int]:
    return [block.block_hash for page in pages if (block := state.pages[page].block) is not None]


def test_a_block_of_two_ranks_becomes_one_page_with_the_holders_of_both() -> None:
    blocks = chain_of("ab")
    states = [
        rank_state([blocks], kept=[], running=[request(rank, [0, 1], rank=rank, registered=2)])
        for rank in range(2)
    ]
    switched = merged(states)
    (state,) = switched.states
    assert [page.block for page in state.pages] == blocks
    assert [one.pages for one in state.running] == [[0, 1], [0, 1]]
    assert switched.reads == [[], []], "each rank has the unit of its own group"
    assert [page.units for page in state.pages] == [(0, 1), (2, 3)]


def test_a_page_that_one_rank_keeps_and_another_holds_is_held() -> None:
    blocks = chain_of("ab")
    keeping = rank_state([blocks], kept=[1, 0], running=[])
    holding = rank_state([blocks[:1]], kept=[], running=[request(0, [0], rank=1, registered=1)])
    (state,) = merged([keeping, holding]).states
    assert hashes(state, state.kept) == [blocks[1].block_hash]


def test_what_a_rank_used_last_is_evicted_last() -> None:
    a, b, c, d = (chain_of(letter)[0] for letter in "abcd")
    first = rank_state([[a], [b]], kept=[0, 1], running=[])
    second = rank_state([[c], [d], [a]], kept=[0, 2, 1], running=[])
    (state,) = merged([first, second]).states
    assert hashes(state, state.kept) == [one.block_hash for one in (c, a, b, d)]


def test_kept_pages_make_room_from_the_first_on_and_are_named() -> None:
    blocks = chain_of("abc")
    holding = rank_state([chain_of("xyz")], kept=[], running=[request(0, [0, 1, 2], registered=3)], free=1)
    keeping = rank_state([blocks], kept=[2, 1, 0], running=[], free=0)
    switched = merged([holding, keeping])
    assert switched.evicted == [blocks[2].block_hash, blocks[1].block_hash]
    (state,) = switched.states
    assert hashes(state, state.kept) == [blocks[0].block_hash]
    assert {read.unit for read in switched.reads[1]} == {2, 3, 4}, "units of the evicted pages, in order"


def test_requests_stand_in_the_order_of_their_arrival() -> None:
    states = [
        rank_state([], kept=[], running=[request(number, [], rank=rank) for number in numbers])
        for rank, numbers in enumerate([[1, 4], [0, 3], [2]])
    ]
    (state,) = merged(states).states
    assert [one.number for one in state.running] == [0, 1, 2, 3, 4]


def test_a_hash_with_two_contents_stays_with_the_first_rank_and_the_rest_is_private() -> None:
    theirs = chain_of("abc")
    forged = [Block(one.identity, other.tokens) for one, other in zip(theirs, chain_of("axc"), strict=True)]
    states = [
        rank_state([theirs], kept=[], running=[request(0, [0, 1, 2], registered=3)]),
        rank_state([forged], kept=[], running=[request(1, [0, 1, 2], rank=1, registered=3)]),
    ]
    (state,) = merged(states).states
    assert [page.block for page in state.pages] == [*theirs, None, None]
    first, second = state.running
    assert (first.pages, first.registered, first.collided) == ([0, 1, 2], 3, False)
    assert (second.pages, second.registered, second.collided) == ([0, 3, 4], 1, True), (
        "the last block equals theirs in all but what comes before it"
    )


def test_a_kept_page_of_a_collided_hash_is_dropped_and_its_hash_stays_registered() -> None:
    theirs = chain_of("a")
    forged = [Block(theirs[0].identity, chain_of("x")[0].tokens)]
    switched = merged([rank_state([one], kept=[0], running=[]) for one in (theirs, forged)])
    (state,) = switched.states
    assert [page.block for page in state.pages] == theirs
    assert switched.evicted == []


def test_pages_without_computed_tokens_are_not_read() -> None:
    engine = SwitchableEngine(2, 2, 20, max_running=4)
    engine.submit(0, [1] * 60, 2)
    engine.step()
    (sequence,) = engine.states()[0].running
    assert (len(sequence.pages), sequence.computed) == (15, 12)
    assert [len(reads) for reads in engine.switch().reads] == [0, 3]


@pytest.mark.parametrize(
    ("ranks", "groups", "merging", "splitting"), [(8, 4, 7, 3), (8, 8, 7, 7), (8, 1, 7, 0), (2, 2, 1, 1)]
)
def test_units_read_are_those_of_the_fact_sheet(
    ranks: int, groups: int, merging: int, splitting: int
) -> None:
    """Reads for each page, of units that are 1 / groups of its bytes."""
    engine = SwitchableEngine(ranks, groups, 40)
    engine.submit(0, [1] * 30, 2)
    for _ in range(3):
        engine.step()
    assert sum(map(len, engine.switch().reads)) == merging * 8
    assert sum(map(len, engine.switch().reads)) == splitting * 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(12, 24), st.sampled_from([(2, 2), (4, 4), (4, 2)]))
def test_as_few_pages_are_evicted_as_the_order_of_eviction_permits(
    seed: int, blocks: int, shape: tuple[int, int]
) -> None:
    """The oracle counts units from scratch for every number of evicted pages."""
    ranks, groups = shape
    engine = SwitchableEngine(ranks, groups, blocks, seed=seed, preempt=True)
    for number in range(ranks * 6):
        prompt = [engine.random.randrange(3)] * 8 + [engine.random.randrange(3) for _ in range(12)]
        engine.submit(number % ranks, prompt, engine.random.randint(1, 12))
    while len(engine.open_requests) > 3:
        engine.step()
    before = engine.states()
    (state,) = engine.plan_switch().states
    if state.waiting:
        return
    order = hashes_in_order_of_eviction(before)
    fitting = next(count for count in range(len(order) + 1) if room(before, set(order[:count]), groups))
    assert hashes(state, state.kept) == order[fitting:]


def hashes_in_order_of_eviction(states: list[KvState]) -> list[int]:
    held = {name for state in states for one in state.running for name in hashes(state, one.pages)}
    places = [
        (at - len(state.kept), rank, name)
        for rank, state in enumerate(states)
        for at, name in enumerate(hashes(state, state.kept))
        if name not in held
    ]
    order = [name for _, _, name in sorted(places)]
    return [name for at, name in enumerate(order) if name not in order[at + 1 :]]


def room(states: list[KvState], evicted: set[int], groups: int) -> bool:
    """True if every rank has a free unit for each page that it lacks, without these blocks."""
    ours = [
        {page.block.block_hash for page in state.pages if page.block is not None} - evicted
        for state in states
    ]
    private = [sum(page.block is None for page in state.pages) for state in states]
    every = len(set().union(*ours)) + sum(private)
    return all(
        every - len(names) - own <= len(state.free[0]) + groups * (len(state.pages) - len(names) - own)
        for state, names, own in zip(states, ours, private, strict=True)
    )
