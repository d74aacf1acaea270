"""Recovery answers and dumps give the blocks of each rank."""

import random

import pytest

from fleet.blocks import local_hashes
from fleet.facts.dynamo_kv import KvChange
from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.recovery import decode_dump, decode_indexer_answer
from tests.router.dynamo.recorded import DUMP, RECORDED, WORKER, mutated


def test_a_dump_has_the_blocks_that_each_rank_still_holds() -> None:
    blocks = decode_dump(DUMP)
    assert set(blocks) == {(WORKER, 0), (WORKER, 1)}
    for events in blocks.values():
        (event,) = events
        assert isinstance(event.data, KvChange)
        assert event.data.stored is not None
        assert [one.tokens_hash for one in event.data.stored.blocks] == local_hashes(range(48))


def test_blocks_outside_device_memory_are_left_out() -> None:
    event = RECORDED["dump"][0] | {"storage_tier": "host_pinned"}
    found = decode_indexer_answer({"TreeDump": {"events": [event], "last_event_id": 3}})
    assert found.events[0].storage_tier == "host_pinned"
    assert decode_dump(DUMP.replace(b'"device"', b'"disk"')) == {}


@pytest.mark.parametrize(("form", "whole"), [("TreeDump", True), ("Events", False)])
def test_both_answers_of_a_local_indexer_are_read(form: str, whole: bool) -> None:
    found = decode_indexer_answer({form: {"events": RECORDED["dump"], "last_event_id": 17}})
    assert (found.whole, found.last_event_id, len(found.events)) == (whole, 17, 2)


@pytest.mark.parametrize(
    "answer",
    [
        {"TooNew": {"requested_start": 9, "requested_end": None, "newest_available": 4}},
        {"InvalidRange": {"start_id": 3, "end_id": 1}},
        {"Error": "worker_id mismatch"},
        {"Unheard": 1},
        {},
        None,
        [],
        {"TreeDump": {"events": [1], "last_event_id": 17}},
        {"TreeDump": {"events": []}},
    ],
)
def test_an_answer_without_events_is_malformed(answer: object) -> None:
    with pytest.raises(Malformed):
        decode_indexer_answer(answer)


def test_a_thousand_mutated_dumps_are_read_or_malformed() -> None:
    chance, malformed = random.Random(2), 0
    for _ in range(1000):
        try:
            decode_dump(mutated(DUMP, chance))
        except Malformed:
            malformed += 1
    assert 0 < malformed < 1000
