"""Base of all messages on the bus: a closed, tagged union (`fleet.messages.AnyEvent`).

Every `worker_id` is a random u64 per incarnation of an engine. `rank` is Dynamo's `dp_rank`. The envelope
(`bus.protocol.codec`) carries sequence number, publisher and time. Readers ignore fields that they do not
know.
"""

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the tagged union; the tag is the class name."""
