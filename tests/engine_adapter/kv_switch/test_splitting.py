"""Splitting: which rank gets which pages, where units are read from, and what is dropped."""

from engine_adapter.kv_switch.kv_state import KvState, Switched
from tests.engine_adapter.kv_switch.kv_fixture import SIZE, SwitchableEngine


def hashes(state: KvState) -> list[int]:
    return [page.block.block_hash for page in state.pages if page.block is not None]


def kept_hashes(state: KvState) -> list[int]:
    return [block.block_hash for page in state.kept if (block := state.pages[page].block) is not None]


def merged_engine(ranks: int, groups: int, blocks: int) -> SwitchableEngine:
    engine = SwitchableEngine(ranks, groups, blocks, max_running=20)
    engine.switch()
    return engine


def keep(engine: SwitchableEngine, *prompts: str) -> None:
    """Leave the pages of these prompts in the cache, `SIZE` tokens per letter."""
    for prompt in prompts:
        engine.submit(0, [ord(letter) for letter in prompt for _ in range(SIZE)] + [0], 1)
        while engine.origins:
            engine.step()


def hold(engine: SwitchableEngine, rank: int, prompt: str) -> None:
    engine.submit(rank, [ord(letter) for letter in prompt for _ in range(SIZE)] + [rank], 20)
    while engine.served[0].scheduler.uncomputed_prompt_tokens:
        engine.step()


def test_a_shared_page_goes_to_every_rank_with_a_holder_and_is_read_once_by_each() -> None:
    engine = merged_engine(2, 2, 40)
    for rank in (0, 1, 0, 1):
        hold(engine, rank, "abcdef")
    shared = hashes(engine.states()[0])[:6]
    switched = engine.switch()
    assert [len(state.running) for state in switched.states] == [2, 2]
    for state, reads in zip(switched.states, switched.reads, strict=True):
        assert hashes(state)[:6] == shared
        assert len(reads) == len(state.pages)


def test_a_kept_chain_goes_whole_to_the_rank_that_has_its_beginning() -> None:
    engine = merged_engine(2, 2, 40)
    keep(engine, "abcd")
    hold(engine, 0, "xyzuvw")
    hold(engine, 1, "ab")
    first, second = engine.switch().states
    assert len(first.kept) == 0
    assert len(second.kept) == 2, "it has more pages than the other, but the chain begins there"


def test_kept_chains_without_a_holder_spread_by_pages() -> None:
    engine = merged_engine(3, 1, 40)
    keep(engine, "abc", "def", "ghi")
    states = engine.switch().states
    assert [len(state.kept) for state in states] == [3, 3, 3]
    assert all(state.pages[0].parent is None and len(state.pages) == 3 for state in states)


def test_the_chain_of_the_last_request_is_kept_where_not_all_fit() -> None:
    engine = merged_engine(2, 2, 10)
    keep(engine, "abcdef", "ghijkl", "mnopqr")
    before = engine.states()[0]
    switched = engine.switch()
    assert switched.evicted
    assert set(switched.evicted).isdisjoint(kept_hashes(before)[-6:]), "the last chain stays whole"
    assert switched.evicted == [name for name in kept_hashes(before) if name in set(switched.evicted)]


def test_a_chain_gets_a_copy_of_its_beginning_where_the_rank_that_has_it_is_full() -> None:
    engine = merged_engine(2, 2, 10)
    keep(engine, "abxy", "abcdefghi")
    switched = engine.switch()
    assert switched.evicted == []
    assert sorted(len(state.kept) for state in switched.states) == [4, 9]


def test_replicas_of_a_head_group_share_the_reads() -> None:
    engine = merged_engine(8, 2, 40)
    for rank in range(8):
        hold(engine, rank, "abcdefgh"[rank] * 4)
    switched = engine.switch()
    sources = sources_of(switched)
    assert len(sources) == 8
    assert max(sources.values()) - min(sources.values()) <= 1


def sources_of(switched: Switched) -> dict[int, int]:
    """Reads by the rank that is read from."""
    counts: dict[int, int] = {}
    for reads in switched.reads:
        for read in reads:
            counts[read.source_rank] = counts.get(read.source_rank, 0) + 1
    return counts


def test_a_waiting_request_goes_to_the_rank_with_the_fewest_pages_and_its_prefix() -> None:
    engine = merged_engine(2, 2, 40)
    hold(engine, 0, "abcdef")
    hold(engine, 1, "uvwxyz")
    engine.submit(0, [ord("u")] * SIZE + [ord("v")] * SIZE + [1], 2)
    engine.submit(1, [2] * SIZE * 4, 2)
    engine.submit(1, [2], 2)
    first, second = engine.switch().states
    assert [one.number for one in first.waiting] == [3]
    assert [one.number for one in second.waiting] == [2, 4]
