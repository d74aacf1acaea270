"""Outbox: the requests of one turn of the event loop leave together at its end, in order."""

import asyncio

from router.upstream.outbox import Outbox


class Wire(asyncio.Transport):
    """Transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed


async def test_requests_leave_at_the_end_of_their_turn_in_order() -> None:
    outbox, one, other = Outbox(), Wire(), Wire()
    for turn in range(2):
        outbox.add(one, b"first %d" % turn)
        outbox.add(other, b"second %d" % turn)
        assert (len(one.written), len(other.written)) == (turn, turn)
        await asyncio.sleep(0)
    assert one.written == [b"first 0", b"first 1"]
    assert other.written == [b"second 0", b"second 1"]


async def test_a_connection_that_closed_meanwhile_gets_nothing_and_the_others_do() -> None:
    outbox, gone, here = Outbox(), Wire(), Wire()
    outbox.add(gone, b"lost")
    outbox.add(here, b"sent")
    gone.closed = True
    await asyncio.sleep(0)
    assert (gone.written, here.written) == ([], [b"sent"])
