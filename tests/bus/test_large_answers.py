"""Answers that are stored briefly and fetched in parts; and full stores."""

import asyncio
import logging

import pytest

from bus import Message, StoreFull
from bus.large_answers import IN_USE_SECONDS, PartedAnswers
from bus.protocol.codec import PART_BYTES, PartRequest, PartsOffer
from bus.stores import AGAIN_SECONDS, StoreRefusals
from fleet.requests.refusal import RequestRefused

KEPT_SECONDS = 10.0


def message(text: str) -> Message:
    return RequestRefused(reason=text)


def content_of(answers: PartedAnswers, offer: PartsOffer) -> bytes | None:
    parts = [
        answers.part(PartRequest(publisher_id=1, answer=offer.answer, part=number))
        for number in range(offer.parts)
    ]
    return None if None in parts else b"".join(part for part in parts if part is not None)


@pytest.mark.parametrize("length", [1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES - 1])
async def test_the_parts_of_an_offer_make_its_content_and_there_are_no_others(length: int) -> None:
    answers, content = PartedAnswers(10 * PART_BYTES, KEPT_SECONDS), bytes(range(256)) * (length // 256 + 1)
    offer = answers.keep(message("m"), "x", content[:length])
    assert offer.size == length
    assert content_of(answers, offer) == content[:length]
    for answer, part in ((offer.answer, offer.parts), (offer.answer, 1 << 63), (offer.answer + 1, 0)):
        assert answers.part(PartRequest(publisher_id=1, answer=answer, part=part)) is None
    answers.clear()


async def test_the_same_message_is_kept_once_and_an_equal_one_is_another() -> None:
    answers, said = PartedAnswers(100, KEPT_SECONDS), message("m")
    offer = answers.keep(said, "x", b"1" * 40)
    assert answers.offered(said) == offer
    assert answers.offered(message("m")) is None
    answers.clear()


@pytest.mark.looptime
async def test_an_answer_is_forgotten_when_nothing_of_it_was_fetched_for_a_while() -> None:
    answers, said = PartedAnswers(100, KEPT_SECONDS), message("m")
    offer = answers.keep(said, "x", b"1" * 40)
    for _ in range(4):
        await asyncio.sleep(0.6 * KEPT_SECONDS)
        assert content_of(answers, offer) == b"1" * 40
    await asyncio.sleep(2.1 * KEPT_SECONDS)
    assert (answers.stored_bytes, answers.offered(said), content_of(answers, offer)) == (0, None, None)


@pytest.mark.looptime
async def test_room_is_made_of_what_is_not_being_fetched_and_else_refused() -> None:
    answers = PartedAnswers(100, KEPT_SECONDS)
    first, second = answers.keep(message("1"), "x", b"1" * 40), answers.keep(message("2"), "x", b"2" * 40)
    with pytest.raises(StoreFull, match="answers_bytes"):
        answers.keep(message("3"), "x", b"3" * 40)
    await asyncio.sleep(IN_USE_SECONDS + 0.1)
    third = answers.keep(message("3"), "x", b"3" * 40)
    assert [content_of(answers, one) for one in (first, second, third)] == [None, b"2" * 40, b"3" * 40]
    with pytest.raises(StoreFull):
        answers.keep(message("4"), "x", b"4" * 101)
    answers.clear()


@pytest.mark.looptime
async def test_what_everybody_has_fetched_makes_room_at_once() -> None:
    answers, shared = PartedAnswers(100, KEPT_SECONDS), message("1")
    first = answers.keep(shared, "x", b"1" * 60)
    assert answers.offered(shared) == first
    assert content_of(answers, first) == b"1" * 60
    with pytest.raises(StoreFull):  # one of two has fetched it
        answers.keep(message("2"), "x", b"2" * 60)
    assert content_of(answers, first) == b"1" * 60
    second = answers.keep(message("2"), "x", b"2" * 60)
    assert [content_of(answers, one) for one in (first, second)] == [None, b"2" * 60]
    answers.clear()


def test_a_full_store_is_an_error_in_the_log_once_a_minute_and_counted_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    full = StoreRefusals(lambda: now[0])
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            full.count("parcels", StoreFull("no room for 5 bytes"))
        full.count("blobs", StoreFull("none"))
        now[0] = AGAIN_SECONDS
        full.count("parcels", StoreFull("no room for 7 bytes"))
    assert full["parcels"] == 6
    assert full["answers"] == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "6 times" in caplog.messages[2]
    assert "7 bytes" in caplog.messages[2]
    with pytest.raises(KeyError):
        full["cellar"]
