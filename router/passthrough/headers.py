"""Headers that pass between client and server: all end-to-end ones (RFC 9110, 7.6.1), but credentials
that are not meant for the server. Pure."""

from collections.abc import Iterable

from router.reply import Headers

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"proxy-authenticate",
        b"proxy-authorization",
    }
)
_FRAMING = frozenset({b"host", b"content-length", b"expect"})
"""Belong to one message on one connection; this router writes its own."""
_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
"""OpenAI's, Anthropic's and Azure's."""
_OURS = b"x-roost-"
_TRACE = frozenset({b"traceparent", b"tracestate"})


def to_server(client: Iterable[tuple[bytes, bytes]], own: Headers, *, credentials: bool) -> Headers:
    """A client's headers for the server, and the router's own, which replace the client's of the same name.

    credentials: the client's own key is meant for the server. Accept-Encoding stays behind: the router reads
    usage and token ids in answers, so these must not be compressed. Trace context comes from `own` alone.
    """
    client = list(client)
    dropped = _dropped(client) | {name for name, _ in own} | _TRACE | {b"accept-encoding"}
    if not credentials:
        dropped |= _CREDENTIALS
    return [
        *((name, value) for name, value in client if name not in dropped and not name.startswith(_OURS)),
        *own,
    ]


def to_client(server: Iterable[tuple[bytes, bytes]], own: Headers) -> Headers:
    """A server's headers for the client, before the router's own, which replace the server's of the same
    name."""
    server = [(name.lower(), value) for name, value in server]
    dropped = _dropped(server) | {name for name, _ in own}
    return [*((name, value) for name, value in server if name not in dropped), *own]


def value_of(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str:
    """The first value of a header (name in lower case); "" without one."""
    return next((value.decode("latin-1") for name, value in headers if name == wanted), "")


def _dropped(headers: Headers) -> frozenset[bytes]:
    """Hop-by-hop headers: the known ones and those that Connection names."""
    named = {
        option.strip().lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    }
    return _HOP_BY_HOP | _FRAMING | named
