"""The answer to a request that cannot be fulfilled."""

from fleet.event import Event


class RequestRefused(Event, frozen=True, kw_only=True):
    """Answer to a request that cannot be fulfilled, with cause and remedy."""

    reason: str
