"""Locations of the objects of earlier answers: responses, files and batches, by id. Pure, bounded.

Each router process knows the objects that were created through it. For other objects it queries every server,
which works everywhere.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from fleet.completions import UNREADABLE
from router.fleet_state.target_table import RankKey
from router.http.server_sent_events import event_data

MAX_OBJECTS = 16_384
_MAX_ID = 256


class ObjectLocation(NamedTuple):
    """rank: of the server that holds the object. tenant: owner of the key that created it; "" without client
    keys.
    """

    rank: RankKey
    tenant: str


class ObjectLocations:
    """State: locations by object id, the least recently used first."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, ObjectLocation] = OrderedDict()

    def note(self, object_id: str, place: ObjectLocation) -> None:
        """Record a created object. The oldest entry is evicted."""
        self._places[object_id] = place
        self._places.move_to_end(object_id)
        if len(self._places) > MAX_OBJECTS:
            self._places.popitem(last=False)

    def find(self, object_id: str) -> ObjectLocation | None:
        """Return an object's location; None if it was not created through this process, or was evicted."""
        place = self._places.get(object_id)
        if place is not None:
            self._places.move_to_end(object_id)
        return place


class _Named(msgspec.Struct):
    id: Any = None


class _Answer(_Named):
    response: _Named | None = None


_ANSWER: msgspec.json.Decoder[_Answer] = msgspec.json.Decoder(_Answer)


def object_id(answer: bytes) -> str | None:
    """Return the id of the object created by an answer: a JSON body, or one of the first events of a stream.
    None without one.
    """
    for piece in answer.split(b"\n\n") if not answer.lstrip().startswith(b"{") else [answer]:
        try:
            found = _ANSWER.decode(event_data(piece) or piece)
        except UNREADABLE:
            continue
        value = found.id if found.response is None else found.response.id
        if isinstance(value, str) and 0 < len(value) <= _MAX_ID:
            return value
    return None
