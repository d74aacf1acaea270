"""The index of KV blocks finds the same as a comparison of prompts, and as Dynamo's radix tree."""

from collections.abc import Sequence

import msgspec
import pytest
from dynamo._core import RadixTree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvRemoved, KvStored, RoutedKvEvent
from router.fleet_state.target_table import RankKey
from router.prefix_index import block_index as module
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import BadKvEvent, KvEventIndex, OrphanBlock
from router.prefix_index.prompt import TextPrompt, TokenPrompt
from tests.router.block_builders import Made, cleared, overlap, removed
from tests.router.router_fixture import WORKER, stored

TOKENS = list(range(1000, 1040))
LOCAL = local_hashes(TOKENS, 4)
CHAINED = sequence_hashes(LOCAL)


def indexed(*events: RoutedKvEvent) -> KvEventIndex:
    index = KvEventIndex(BlockIndex())
    index.apply(events)
    return index


def found(index: KvEventIndex, local: Sequence[int]) -> dict[RankKey, int]:
    return overlap(index.block_index, sequence_hashes(local))


def test_overlap_is_the_contiguous_prefix_per_rank() -> None:
    index = indexed(stored(LOCAL[:6]), stored(LOCAL[:3], rank=1), stored(LOCAL[:9], worker=7))
    assert found(index, LOCAL) == {(WORKER, 0): 6, (WORKER, 1): 3, (7, 0): 9}
    assert found(index, LOCAL[:2]) == {(WORKER, 0): 2, (WORKER, 1): 2, (7, 0): 2}
    assert found(index, LOCAL[1:]) == {}
    assert found(index, []) == {}


def test_a_block_behind_a_gap_does_not_count_until_the_gap_is_filled() -> None:
    index = indexed(stored(LOCAL[:6]), stored(LOCAL[:6], rank=1), removed(LOCAL, [2]))
    assert found(index, LOCAL) == {(WORKER, 0): 2, (WORKER, 1): 6}
    index.apply([stored(LOCAL[2:3], LOCAL[:2])])
    assert found(index, LOCAL) == {(WORKER, 0): 6, (WORKER, 1): 6}


def test_only_a_rank_that_lost_a_block_before_those_behind_it_may_have_gaps() -> None:
    other = [*LOCAL[:3], *local_hashes(list(range(16)), 4)]
    index = indexed(*(stored(local, rank=rank) for local in (LOCAL, other) for rank in range(3)))
    index.apply([removed(LOCAL, [9, 8, 7, 6], rank=rank) for rank in range(3)])
    # Remove the fork, and finally all blocks of both branches.
    index.apply([removed(other, [2, 3, 4, 5, 6], rank=0), removed(LOCAL, [3, 4, 5], rank=0)])
    index.apply(
        [removed(LOCAL, [3, 4, 5], rank=1), removed(other, [6, 5, 4, 3], rank=1), removed(LOCAL, [2], rank=1)]
    )
    block_index = index.block_index
    assert [rank for rank in range(3) if block_index.may_have_gaps((WORKER, rank))] == [0]
    index.apply([removed(LOCAL, [4], rank=2)])
    assert found(index, LOCAL) == {(WORKER, 0): 2, (WORKER, 1): 2, (WORKER, 2): 4}
    index.apply([cleared(rank=0), cleared(rank=2)])
    assert not any(block_index.may_have_gaps((WORKER, rank)) for rank in range(3))


def test_blocks_behind_a_block_are_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_CHILDREN", 4)
    arms = [[LOCAL[0], 1000 + arm] for arm in range(40)]
    index = indexed(*(stored(arm) for arm in arms))
    for arm in arms[:36]:
        index.apply([removed(arm, [1])])
    index.apply([stored([2000 + arm], [LOCAL[0]]) for arm in range(60)])
    assert 60 <= index.block_index.links <= 100
    index.apply([cleared()])
    index.block_index.add((1, 1), [5])
    index.block_index.clear((1, 1))
    monkeypatch.setattr(module, "_FEW_STALE", 1)
    assert index.block_index.sweep(1000)
    assert (len(index.block_index), index.block_index.links) == (0, 0)


def test_removals_clearing_and_lost_workers_leave_the_others_alone() -> None:
    index = indexed(stored(LOCAL[:6]), stored(LOCAL[:6], rank=1), stored(LOCAL[:6], worker=7))
    index.apply([removed(LOCAL, [5, 4])])
    assert found(index, LOCAL)[WORKER, 0] == 4
    index.apply([cleared()])
    assert found(index, LOCAL) == {(WORKER, 1): 6, (7, 0): 6}
    index.remove_worker(WORKER)
    assert found(index, LOCAL) == {(7, 0): 6}
    assert index.block_index.entries == 6


def test_removing_what_is_gone_already_is_counted_and_removes_the_rest() -> None:
    index = indexed(stored(LOCAL[:4]))
    gone = KvChange(removed=KvRemoved(block_hashes=(12345, CHAINED[3])))
    index.apply([RoutedKvEvent(worker_id=WORKER, event=KvEvent(event_id=2, data=gone))])
    assert found(index, LOCAL) == {(WORKER, 0): 3}
    assert index.missing_removals == 1


def test_what_lies_in_another_tier_is_not_cached() -> None:
    index = indexed(stored(LOCAL[:4]))
    index.apply(
        [
            msgspec.structs.replace(removed(LOCAL, [3]), storage_tier="host_pinned"),
            msgspec.structs.replace(stored(LOCAL), storage_tier="disk"),
        ]
    )
    assert found(index, LOCAL) == {(WORKER, 0): 4}


def test_a_rank_may_call_its_blocks_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [KvBlock(100 + at, LOCAL[at]) for at in range(6)]
    index = KvEventIndex(BlockIndex())
    say = lambda change: index.apply(  # noqa: E731
        [RoutedKvEvent(worker_id=WORKER, event=KvEvent(event_id=1, data=change))]
    )
    say(KvChange(stored=KvStored(blocks=tuple(named[:3]))))
    say(KvChange(stored=KvStored(blocks=tuple(named[3:]), parent_hash=102)))
    assert found(index, LOCAL) == {(WORKER, 0): 6}
    say(KvChange(removed=KvRemoved(block_hashes=(105, 104, CHAINED[0] ^ 1))))
    assert (found(index, LOCAL), index.missing_removals) == ({(WORKER, 0): 4}, 1)
    say(KvChange(removed=KvRemoved(block_hashes=(100, 101, 102, 103))))
    assert index.block_index.entries == 0
    monkeypatch.setattr("router.prefix_index.kv_event_index.MAX_BLOCKS", 2)
    say(KvChange(stored=KvStored(blocks=tuple(named[:2]))))  # the names of removed blocks do not count
    assert found(index, LOCAL) == {(WORKER, 0): 2}


@pytest.mark.parametrize("behind", [LOCAL[:2], LOCAL[:1]])
def test_a_block_behind_a_parent_that_the_rank_does_not_hold_is_refused(behind: list[int]) -> None:
    index = indexed(stored(LOCAL[:4], rank=1), stored(LOCAL[:1]), cleared())
    with pytest.raises(OrphanBlock, match="does not hold"):
        index.apply([stored(LOCAL[2:4], behind)])
    assert found(index, LOCAL) == {(WORKER, 1): 4}


@pytest.mark.parametrize(
    "change",
    [
        KvChange(stored=KvStored(blocks=(KvBlock(CHAINED[0], LOCAL[0]), KvBlock(-1, 5)))),
        KvChange(stored=KvStored(blocks=(KvBlock(5, -1),))),
        KvChange(stored=KvStored(blocks=(KvBlock(5, 2**64),))),
        KvChange(stored=KvStored(blocks=(KvBlock(5, 5),), parent_hash=-5)),
        KvChange(),
        KvChange(stored=KvStored(blocks=()), removed=KvRemoved(block_hashes=())),
    ],
)
def test_nonsense_is_refused_whole(change: KvChange) -> None:
    index = KvEventIndex(BlockIndex())
    with pytest.raises(BadKvEvent):
        index.apply([RoutedKvEvent(worker_id=1, event=KvEvent(event_id=1, data=change))])
    assert len(index.block_index) == 0


def test_a_rank_that_says_it_holds_more_than_any_can_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prefix_index.kv_event_index.MAX_BLOCKS", 8)
    index = indexed(stored(LOCAL[:8]))
    with pytest.raises(BadKvEvent, match="more than 8"):
        index.apply([stored(LOCAL[8:9], LOCAL[:8])])


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_the_index_finds_what_comparing_prompts_finds(held: list[int], looked_up: list[int]) -> None:
    one, two = local_hashes(held, 2), local_hashes(looked_up, 2)
    index = indexed(*([stored(one)] if one else []))
    common = next(
        (at for at in range(min(len(one), len(two))) if one[at] != two[at]), min(len(one), len(two))
    )
    assert found(index, two).get((WORKER, 0), 0) == common


def test_a_prompt_is_hashed_little_further_than_any_rank_holds_it() -> None:
    prompt = TokenPrompt(list(range(16_384)))
    block_index = BlockIndex()
    block_index.add((1, 0), [1, 2, 3])
    assert block_index.overlaps(prompt.chained(16)) == {}
    assert len(prompt.chained(16).hashes) == 1
    block_index.add((1, 0), TokenPrompt(list(range(8_000))).chained(16)[:])
    assert block_index.overlaps(prompt.chained(16)) == {(1, 0): 500}
    assert len(prompt.chained(16).hashes) <= 500 + 32


def test_equal_prompts_of_two_salts_have_no_block_in_common() -> None:
    ids = list(range(2_000))
    seeds = salted_seed(), salted_seed("ours"), salted_seed("theirs")
    hashes = [TokenPrompt(ids, seed).chained(16)[:] for seed in seeds]
    assert hashes == [sequence_hashes(local_hashes(ids, 16, seed)) for seed in seeds]
    assert len({block for chain in hashes for block in chain}) == 3 * 125
    texts = [
        TextPrompt(b"a text of some length, long enough for blocks" * 4, "m", seed).chained(4)[:]
        for seed in seeds
    ]
    assert len({block for chain in texts for block in chain}) == 3 * len(texts[0]) > 0


# Sweeping


def test_what_cleared_ranks_leave_behind_is_swept_out_as_others_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FEW_STALE", 4)
    block_index = BlockIndex()
    for rank in range(6):
        block_index.add((1, rank), CHAINED)
    block_index.add((1, 0), list(range(1, 301)))
    for rank in range(5):
        block_index.clear((1, rank))
        assert overlap(block_index, CHAINED) == {(1, other): 10 for other in range(rank + 1, 6)}
    assert (len(block_index), block_index.entries) == (310, 10)
    for _ in range(10):
        block_index.add((1, 5), CHAINED)
    assert (len(block_index), overlap(block_index, CHAINED)) == (10, {(1, 5): 10})
    block_index.add((9, 9), CHAINED[:2])
    assert overlap(block_index, CHAINED) == {(1, 5): 10, (9, 9): 2}
    assert block_index.slot_count <= 8  # slots are reused


class Compared(RuleBasedStateMachine):
    """Random events and lookups, compared with plain sets of blocks per rank, and with Dynamo's tree where
    both agree by design. After a gap (a parent removed before its child) Dynamo's tree is not compared
    further, since its result for gaps is its own decision.
    """

    PROMPTS = tuple(sequence_hashes([tail % 3 + 10 * head for tail in range(9)]) for head in range(2))
    LOCALS = tuple([tail % 3 + 10 * head for tail in range(9)] for head in range(2))

    @initialize(few=st.sampled_from([1, 1024]))
    def begin(self, few: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "_FEW_STALE", few)
        self.patch.setattr(module, "_MIN_SWEPT", 1)
        self.patch.setattr(module, "_SWEPT_PER_WRITE", 0)
        self.patch.setattr(module, "_MAX_MASKS", 3)
        self.index = KvEventIndex(BlockIndex())
        self.tree = RadixTree()
        self.sets: dict[RankKey, set[int]] = {}
        self.gaps = False

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    @rule(
        worker=st.integers(1, 3),
        rank=st.integers(0, 2),
        prompt=st.integers(0, 1),
        start=st.integers(0, 8),
        count=st.integers(1, 6),
    )
    def store(self, worker: int, rank: int, prompt: int, start: int, count: int) -> None:
        held = self.sets.setdefault((worker, rank), set())
        chained, local = self.PROMPTS[prompt], self.LOCALS[prompt]
        event = stored(local[start : start + count], local[:start], worker, rank)
        if start and chained[start - 1] not in held:
            with pytest.raises(OrphanBlock):
                self.index.apply([event])
            return
        self.index.apply([event])
        self._publish(event)
        held.update(chained[start : start + count])

    @rule(worker=st.integers(1, 3), rank=st.integers(0, 2), prompt=st.integers(0, 1), keep=st.integers(0, 8))
    def evict(self, worker: int, rank: int, prompt: int, keep: int) -> None:
        """Remove blocks from the end, as caches do."""
        held = self.sets.setdefault((worker, rank), set())
        which = [at for at in range(8, keep - 1, -1) if self.PROMPTS[prompt][at] in held]
        if which:
            event = removed(self.LOCALS[prompt], which, worker, rank)
            self.index.apply([event])
            self._publish(event)
            held.difference_update(self.PROMPTS[prompt][keep:])

    @rule(worker=st.integers(1, 3), rank=st.integers(0, 2), prompt=st.integers(0, 1), at=st.integers(0, 8))
    def lose(self, worker: int, rank: int, prompt: int, at: int) -> None:
        """Remove any block, held or not."""
        held = self.sets.setdefault((worker, rank), set())
        before = self.index.missing_removals
        self.index.apply([removed(self.LOCALS[prompt], [at], worker, rank)])
        block = self.PROMPTS[prompt][at]
        assert self.index.missing_removals - before == (block not in held)
        held.discard(block)
        self.gaps = True

    @rule(worker=st.integers(1, 3), rank=st.integers(0, 2))
    def clear(self, worker: int, rank: int) -> None:
        self.index.apply([cleared(worker, rank)])
        self._publish(cleared(worker, rank))
        self.sets.pop((worker, rank), None)

    @rule(worker=st.integers(1, 3))
    def leave(self, worker: int) -> None:
        self.index.remove_worker(worker)
        self.tree.remove_worker(worker)
        self.sets = {key: held for key, held in self.sets.items() if key[0] != worker}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "sets"):
            return
        for prompt, local in zip(self.PROMPTS, self.LOCALS, strict=True):
            true = {key: _leading(held, prompt) for key, held in self.sets.items() if prompt[0] in held}
            assert self.index.block_index.overlaps(Made(prompt)) == true
            if not self.gaps:
                assert self.tree.find_matches(local).scores == true
        assert self.index.block_index.entries == sum(len(held) for held in self.sets.values())

    def _publish(self, event: RoutedKvEvent) -> None:
        if not self.gaps:
            self.tree.apply_event(event.worker_id, msgspec.json.encode(event.event))


def _leading(held: set[int], prompt: Sequence[int]) -> int:
    return next((at for at, block in enumerate(prompt) if block not in held), len(prompt))


Compared.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRandomEventsLeaveWhatPlainSetsAndDynamosTreeHold = Compared.TestCase
