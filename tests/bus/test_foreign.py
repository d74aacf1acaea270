"""Subjects of other systems are received as they were sent."""

import nats
import pytest

from bus import BusError
from bus.nats.foreign import ForeignSubjects


async def test_messages_of_all_matching_subjects_arrive_as_they_were_sent(nats_url: str) -> None:
    subjects = await ForeignSubjects.open(nats_url, "elsewhere.*.kv-events", "elsewhere.*.kv_metrics")
    sender = await nats.connect(nats_url)
    try:
        for subject, data in (
            ("elsewhere.a.kv-events", b"1"),
            ("elsewhere.a.other", b"not this"),
            ("elsewhere.b.kv_metrics", b"\x00\xff"),
            ("elsewhere.b.kv-events", b""),
        ):
            await sender.publish(subject, data)
        assert sorted([await subjects.receive() for _ in range(3)]) == [b"", b"\x00\xff", b"1"]
        assert subjects.dropped == 0
    finally:
        await sender.close()
        await subjects.close()


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BusError, match="no NATS server"):
        await ForeignSubjects.open("nats://127.0.0.1:9", "a", seconds=0.3)
