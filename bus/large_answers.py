"""Answers too large for one message: held briefly by the server, fetched part by part by the requester.

The first answer is an offer (`codec.PartsOffer`). The requester then requests each part on the same subject,
and repeats the request for a part that does not arrive. Every message answers one request, so the requester
controls the pace, no server-side store is involved, and an answer reaches only its requester's inbox.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from bus import BusError, BusTimeout, Message, NobodyThere, StoreFull
from bus.protocol.codec import (
    PART_BYTES,
    PART_TOPIC,
    Envelope,
    PartRequest,
    PartsOffer,
    RejectionReason,
    Undeliverable,
    checksum,
    unseal,
)

PART_SECONDS = 1.0
"""Time before the request for a part is repeated. It doubles with every attempt, since the server may only be
slow.
"""
WINDOW = 4
"""Parts of one answer in flight at once."""
ELSEWHERE_SECONDS = 0.002
"""Pause after another server of the same subject received the request for a part."""
AWAY_SECONDS = 0.1
"""Pause while the subject has no server, which may be reconnecting."""
IN_USE_SECONDS = 3.0
"""An answer is in use while it is not fully fetched by all requesters and a part was fetched within this
time. Answers in use are not evicted.
"""

Exchange = Callable[[bytes, float], Awaitable[bytes]]
"""Sends one request, as bytes, and returns the first answer. BusTimeout after the given seconds."""
Sealed = Callable[[PartRequest], bytes]


@dataclass(slots=True)
class _Kept:
    message: Message
    offer: PartsOffer
    content: bytes
    touched: float
    """seconds on the loop's clock"""
    owed: int
    """parts that requesters of the offer have not fetched yet"""


class PartedAnswers:
    """Store of large answers: at most `max_bytes`. An answer expires `seconds` after the last part was
    fetched.

    The same message object answers several requests with one offer: it is encoded and stored once.
    """

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._by_message: dict[int, int] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(len(kept.content) for kept in self._kept.values())

    def offered(self, message: Message) -> PartsOffer | None:
        """Return the offer of a message that is stored already."""
        number = self._by_message.get(id(message))
        if number is None:
            return None
        kept = self._touched(number)
        kept.owed += kept.offer.parts
        return kept.offer

    def keep(self, message: Message, topic: str, payload: bytes) -> PartsOffer:
        """Store a payload and return its offer. StoreFull if answers in use leave no room."""
        self._make_room(len(payload))
        self._number += 1
        parts = -(-len(payload) // PART_BYTES)
        offer = PartsOffer(
            topic=topic, answer=self._number, size=len(payload), parts=parts, checksum=checksum(payload)
        )
        self._kept[self._number] = _Kept(message, offer, payload, self._now(), parts)
        self._by_message[id(message)] = self._number
        self._watch()
        return offer

    def part(self, request: PartRequest) -> bytes | None:
        """Return up to PART_BYTES of an answer; None if the answer is not stored (any more) or has no such
        part.
        """
        if request.answer not in self._kept:
            return None
        kept = self._touched(request.answer)
        kept.owed -= 1
        return kept.content[request.part * PART_BYTES : (request.part + 1) * PART_BYTES] or None

    def clear(self) -> None:
        self._kept.clear()
        self._by_message.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _touched(self, number: int) -> _Kept:
        kept = self._kept[number]
        kept.touched = self._now()
        self._kept.move_to_end(number)
        return kept

    def _make_room(self, size: int) -> None:
        while self.stored_bytes + size > self._max_bytes:
            done = next(
                (
                    number
                    for number, kept in self._kept.items()
                    if kept.owed <= 0 or self._idle(kept) > IN_USE_SECONDS
                ),
                None,
            )
            if done is None:
                raise StoreFull(
                    f"an answer of {size} bytes finds no room beside {len(self._kept)} others that are being"
                    f" fetched ({self.stored_bytes} of {self._max_bytes} bytes); ask again in a moment, or"
                    " raise bus.answers_bytes"
                )
            self._drop(done)

    def _idle(self, kept: _Kept) -> float:
        return self._now() - kept.touched

    def _drop(self, number: int) -> None:
        del self._by_message[id(self._kept.pop(number).message)]

    def _watch(self) -> None:
        if self._timer is None and self._kept:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        while self._kept and self._idle(next(iter(self._kept.values()))) >= self._seconds:
            self._drop(next(iter(self._kept)))
        self._watch()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def fetch_parts(
    offer: PartsOffer, publisher_id: int, exchange: Exchange, sealed: Sealed, seconds: float
) -> bytes:
    """Fetch all parts of an offered answer, WINDOW at a time.

    publisher_id: of the offer. BusTimeout if a part does not arrive within `seconds`. BusError if the answer
    is no longer stored, or damaged.
    """
    content = bytearray(offer.size)
    numbers = iter(range(offer.parts))

    async def fetch_some() -> None:
        for number in numbers:
            part = await _fetched(
                PartRequest(publisher_id=publisher_id, answer=offer.answer, part=number),
                exchange,
                sealed,
                seconds,
            )
            at = number * PART_BYTES
            if len(part) != min(PART_BYTES, offer.size - at):
                raise BusError(f"part {number} of an answer of {offer.size} bytes has {len(part)}; ask again")
            content[at : at + len(part)] = part

    try:
        async with asyncio.TaskGroup() as fetching:
            for _ in range(min(WINDOW, offer.parts)):
                fetching.create_task(fetch_some(), name="fetches parts of an answer")
    except* BusError as failures:
        failure: BaseException = failures.exceptions[0]
    else:
        if checksum(content) != offer.checksum:
            raise BusError(f"an answer of {offer.size} bytes came damaged; ask again")
        return bytes(content)
    raise failure


async def _fetched(request: PartRequest, exchange: Exchange, sealed: Sealed, seconds: float) -> bytes:
    """Request one part until it arrives."""
    clock = asyncio.get_running_loop().time
    until, patience = clock() + seconds, PART_SECONDS
    while True:
        left = until - clock()
        if left <= 0:
            raise BusTimeout(
                f"part {request.part} of an answer did not come within {seconds} s, though requested again"
            )
        try:
            envelope = _read(await exchange(sealed(request), min(left, patience)))
        except NobodyThere:
            await asyncio.sleep(min(left, AWAY_SECONDS))
            continue
        except BusTimeout:
            patience *= 2
            continue
        if envelope.topic == PART_TOPIC:
            return envelope.payload
        if envelope.publisher_id == request.publisher_id:
            raise BusError("the answer was dropped before all of it was fetched; ask again")
        await asyncio.sleep(ELSEWHERE_SECONDS)


def _read(raw: bytes) -> Envelope:
    try:
        return unseal(raw)
    except Undeliverable as refusal:
        raise BusError(f"a part of an answer cannot be read: {refusal}") from refusal


def read_part_request(envelope: Envelope) -> PartRequest:
    """Decode the request in an envelope of PART_REQUEST_TOPIC. Undeliverable if it is malformed."""
    try:
        return msgspec.msgpack.decode(envelope.payload, type=PartRequest)
    except (ValueError, RecursionError) as error:
        raise Undeliverable(RejectionReason.PAYLOAD, str(error)) from error
