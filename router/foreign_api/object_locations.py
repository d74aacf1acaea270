"""Where the objects of earlier answers are: responses, files and batches, by id. Pure, bounded.

Each router process knows the objects that were made through it; for others every server is asked, which works
everywhere.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from router.fleet_state.target_table import RankKey

MOST_OBJECTS = 16_384
_LONGEST_ID = 256


class ObjectLocation(NamedTuple):
    """rank: of the server that has an object. tenant: whose key made it; "" without client keys."""

    rank: RankKey
    tenant: str


class ObjectLocations:
    """State: places by object id, the least recently used first."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, ObjectLocation] = OrderedDict()

    def note(self, object_id: str, place: ObjectLocation) -> None:
        """An object was made; the oldest makes room."""
        self._places[object_id] = place
        self._places.move_to_end(object_id)
        if len(self._places) > MOST_OBJECTS:
            self._places.popitem(last=False)

    def find(self, object_id: str) -> ObjectLocation | None:
        """None: it was not made through this process, or long ago."""
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
    """The id of what an answer made: of a JSON body, or of one of the first events of a stream; None: it
    names none."""
    for piece in answer.split(b"\n\n") if not answer.lstrip().startswith(b"{") else [answer]:
        data = b"".join(line[5:] for line in piece.split(b"\n") if line.startswith(b"data:")) or piece
        try:
            found = _ANSWER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        value = found.id if found.response is None else found.response.id
        if isinstance(value, str) and 0 < len(value) <= _LONGEST_ID:
            return value
    return None
