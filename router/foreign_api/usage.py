"""Token counts that a foreign server's answer names. Pure."""

import msgspec

from fleet.completions import Usage

_LAST_EVENTS = 4
"""Usage stands in the last event of a stream, or in the one before its end."""


class _Counted(msgspec.Struct):
    usage: Usage | None = None


_COUNTED: msgspec.json.Decoder[_Counted] = msgspec.json.Decoder(_Counted)


def counted(events: list[bytes]) -> Usage | None:
    """The counts of the last events of a stream, or of a whole body; None: they name none that can be
    read."""
    for event in reversed(events[-_LAST_EVENTS:]):
        if b'"usage"' not in event:
            continue
        try:
            usage = _COUNTED.decode(event.strip().removeprefix(b"data:")).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if usage is not None:
            return usage
    return None
