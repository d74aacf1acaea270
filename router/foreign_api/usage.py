"""Token counts in a foreign server's answer. Pure."""

import msgspec

from fleet.completions import UNREADABLE, Usage
from router.http.server_sent_events import event_data

_LAST_EVENTS = 4
"""Usage is in the last event of a stream, or in the one before."""


class _Counted(msgspec.Struct):
    usage: Usage | None = None


_COUNTED: msgspec.json.Decoder[_Counted] = msgspec.json.Decoder(_Counted)


def counted(events: list[bytes]) -> Usage | None:
    """Return the counts in the last events of a stream, or in an entire body; None if there are no readable
    ones.
    """
    for event in reversed(events[-_LAST_EVENTS:]):
        if b'"usage"' not in event:
            continue
        try:
            usage = _COUNTED.decode(event if event.startswith(b"{") else event_data(event) or event).usage
        except UNREADABLE:
            continue
        if usage is not None:
            return usage
    return None
