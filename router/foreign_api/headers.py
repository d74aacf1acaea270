"""Headers forwarded between client and server: all end-to-end headers (RFC 9110, 7.6.1), except credentials
that are not meant for the server. Pure.
"""

from collections.abc import Iterable, Mapping

from fleet.completions import DECISION_HEADER
from router.http.asgi_response import Headers

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
"""Headers of one message on one connection. The router writes its own."""
_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
"""OpenAI's, Anthropic's and Azure's."""
_OURS = b"x-roost-"
_DECISION = DECISION_HEADER.encode()
_TRACE = frozenset({b"traceparent", b"tracestate"})
_NEVER_TO_CLIENT = _HOP_BY_HOP | _FRAMING
_NEVER_TO_SERVER = _NEVER_TO_CLIENT | _TRACE | {b"accept-encoding"}
_NEVER_WITHOUT_KEY = _NEVER_TO_SERVER | _CREDENTIALS


def decision_header(decision_id: str) -> tuple[bytes, bytes]:
    """Return the header that names a decision."""
    return _DECISION, decision_id.encode()


def own_headers(
    context: Mapping[str, str], request_id: str, decision_id: str | None = None, key: str | None = None
) -> Headers:
    """Return the router's own headers of a request to a server. context: its trace context. key: the server's
    bearer token; None: none.
    """
    own: Headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in context.items()]
    own.append((b"x-request-id", request_id.encode()))
    if decision_id is not None:
        own.append(decision_header(decision_id))
    if key is not None:
        own.append((b"authorization", f"Bearer {key}".encode("latin-1", "replace")))
    return own


def length_of(server: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the server's own content-length, for an answer that is forwarded as it arrives."""
    return [(b"content-length", value) for name, value in server if name.lower() == b"content-length"]


def to_server(client: Headers, own: Headers, *, credentials: bool) -> Headers:
    """Return a client's headers for the server. The router's own headers replace those of the same name.

    credentials: the client's own key is meant for the server. Accept-Encoding is removed, since the router
    reads usage and token ids in answers, which must therefore not be compressed. Trace context comes from
    `own` only.
    """
    never = _NEVER_TO_SERVER if credentials else _NEVER_WITHOUT_KEY
    return _kept(client, own, never, _OURS) + own


def changes_for_server(client: Headers, own: Headers, *, credentials: bool) -> tuple[Headers, list[bytes]]:
    """Return what `to_server` changes, for a proxy that forwards the request itself: the headers to set, and
    the names to remove. Pseudo-headers and the framing of its connections are the proxy's own.
    """
    kept = {name for name, _ in to_server(client, own, credentials=credentials)}
    removed = {
        name
        for name, _ in client
        if name not in kept and name not in _NEVER_TO_CLIENT and not name.startswith(b":")
    }
    return own, sorted(removed)


def to_client(server: Iterable[tuple[bytes, bytes]], own: Headers) -> Headers:
    """Return a server's headers for the client. The router's own headers replace those of the same name."""
    lowered = [(name.lower(), value) for name, value in server]
    return _kept(lowered, own, _NEVER_TO_CLIENT) + own


def value_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """Return the first value of a header (name in lower case), or ""."""
    for found, value in headers:
        if found == name:
            return value.decode("latin-1")
    return ""


def _kept(headers: Headers, own: Headers, never: frozenset[bytes], ours: bytes | None = None) -> Headers:
    """Return the headers that are forwarded: neither in `never`, nor the router's own, nor listed in
    Connection, nor beginning with `ours`.
    """
    replaced = {name for name, _ in own}
    kept = []
    listed = b""
    for field in headers:
        name = field[0]
        if name in never:
            if name == b"connection":
                listed += b"," + field[1]
        elif name not in replaced and (ours is None or not name.startswith(ours)):
            kept.append(field)
    if listed:
        hops = {option.strip().lower() for option in listed.split(b",")}
        kept = [field for field in kept if field[0] not in hops]
    return kept
