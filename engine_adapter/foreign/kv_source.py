"""Addresses of a publisher of KV events. Pure."""

from urllib.parse import urlsplit

import msgspec

_ANY_HOST = ("*", "0.0.0.0", "[::]")


class KvSource(msgspec.Struct, frozen=True):
    """Publisher of one rank's KV events, in the form of vLLM's /kv_event_sources."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True
    may_connect: bool = False
    """The endpoint names one address: publishers bind only "*" and connect to any other, unless they chose
    the port themselves. Not part of the answer."""

    def reachable_from(self, base: str) -> "KvSource":
        """Return the source with addresses that a subscriber can connect to. base: URL of the server."""
        replay = self.replay_endpoint and connectable(self.replay_endpoint, base)
        endpoint = connectable(self.endpoint, base)
        named = endpoint == self.endpoint and endpoint.startswith("tcp://")
        return KvSource(endpoint, replay, self.topic, may_connect=named)


def shifted(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank, given that of rank 0, as vLLM and SGLang derive it: the port plus the
    rank."""
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if endpoint.startswith("tcp://") and port.isdigit() else endpoint


def connectable(endpoint: str, base: str) -> str:
    """Return an endpoint that a subscriber can connect to: a publisher that binds every address is on the
    host of the server's URL."""
    host = urlsplit(base).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    for every in _ANY_HOST:
        if endpoint.startswith(f"tcp://{every}:"):
            return endpoint.replace(every, host, 1)
    return endpoint
