"""Base of all messages on the bus: a closed, tagged union (`fleet.messages.AnyEvent`).

Every `worker_id` is a random u64 per incarnation of an engine. `rank` is Dynamo's `dp_rank`. The envelope
(`bus.protocol.codec`) carries sequence number, publisher and time. Readers ignore fields that they do not
know.
"""

import msgspec

PROTOCOL = 1
"""Version of the messages, and of what parts expect of one another. Raise it with a change that a part of the
previous version would misunderstand, and keep understanding that version: parts one version apart work
together, so that a fleet can be updated part by part. New fields with defaults and new kinds need no new
version. 0 stands for parts that state none.
"""


def understands(protocol: int) -> bool:
    """Return whether parts of this version and of another one may work together."""
    return abs(protocol - PROTOCOL) <= 1


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the tagged union; the tag is the class name."""
