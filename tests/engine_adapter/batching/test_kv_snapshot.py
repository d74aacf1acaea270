"""The mirror of a rank's KV cache against a plain model, and its snapshots against Dynamo's own index."""

import msgspec
from dynamo.llm import RadixTree
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.batching.kv_snapshot import KvMirror
from fleet.blocks import sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvRemoved, KvStored


def stored(*local: int, behind: tuple[int, ...] = ()) -> KvChange:
    """The blocks with these local hashes behind a prefix of local hashes."""
    chain = sequence_hashes([*behind, *local])
    blocks = tuple(KvBlock(block, tokens) for block, tokens in zip(chain[len(behind) :], local, strict=True))
    return KvChange(stored=KvStored(parent_hash=chain[len(behind) - 1] if behind else None, blocks=blocks))


def removed(*prefix: int) -> KvChange:
    """The last block of a prefix."""
    return KvChange(removed=KvRemoved(block_hashes=(sequence_hashes(prefix)[-1],)))


def index(events: tuple[KvEvent, ...]) -> RadixTree:
    tree = RadixTree()
    for event in events:
        tree.apply_event(7, msgspec.json.encode(event))
    return tree


def overlap(tree: RadixTree, *prefix: int) -> int:
    return dict(tree.find_matches(list(prefix)).scores).get((7, 1), 0)


def test_a_snapshot_rebuilds_branches_of_a_shared_prefix() -> None:
    mirror = KvMirror(100)
    for change in (stored(1, 2, 3), stored(4, 5, behind=(1, 2)), stored(9)):
        mirror.apply(change)
    tree = index(mirror.snapshot(1))
    assert [overlap(tree, *prefix) for prefix in ((1, 2, 3), (1, 2, 4, 5), (9,), (2,))] == [3, 4, 1, 0]


def test_runs_of_one_chain_share_an_event() -> None:
    mirror = KvMirror(100)
    mirror.apply(stored(1, 2, 3))
    mirror.apply(stored(4, behind=(1, 2, 3)))
    assert len(mirror.snapshot(0)) == 1


def test_removed_blocks_and_what_hangs_on_them_are_not_in_the_snapshot() -> None:
    mirror = KvMirror(100)
    mirror.apply(stored(1, 2, 3))
    mirror.apply(removed(1, 2))
    assert overlap(index(mirror.snapshot(1)), 1, 2, 3) == 1
    mirror.apply(stored(2, behind=(1,)))  # the parent comes back behind its child
    assert overlap(index(mirror.snapshot(1)), 1, 2, 3) == 3


def test_a_cleared_cache_is_empty() -> None:
    mirror = KvMirror(100)
    mirror.apply(stored(1, 2, 3))
    mirror.apply("cleared")
    assert mirror.snapshot(0) == ()


def test_more_blocks_than_the_rank_has_are_forgotten_and_counted() -> None:
    mirror = KvMirror(2)
    mirror.apply(stored(1, 2, 3))
    assert (len(mirror), mirror.forgotten) == (2, 1)


moves = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear"]), st.lists(st.integers(1, 3), min_size=1, max_size=4)
    ),
    max_size=30,
)


@given(moves)
def test_every_prefix_has_the_overlap_that_a_set_of_cached_prefixes_gives(
    moves: list[tuple[str, list[int]]],
) -> None:
    mirror, held = KvMirror(1000), set[tuple[int, ...]]()
    for what, locals_ in moves:
        prefix = tuple(locals_)
        if what == "store":
            mirror.apply(stored(*prefix))
            held |= {prefix[:length] for length in range(1, len(prefix) + 1)}
        elif what == "remove":
            mirror.apply(removed(*prefix))
            held.discard(prefix)
        else:
            mirror.apply("cleared")
            held.clear()
    tree = index(mirror.snapshot(1))
    for _, locals_ in moves:
        expected = next(
            (length for length in range(len(locals_)) if tuple(locals_[: length + 1]) not in held),
            len(locals_),
        )
        assert overlap(tree, *locals_) == expected
