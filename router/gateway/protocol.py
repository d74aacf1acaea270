"""The endpoint picker protocol of the Gateway API Inference Extension: requests of the proxy read, answers
to it built. Pure.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from fleet.completions import ApiError
from router.gateway.endpoints import Subset
from router.gateway.messages import Message, ProcessingResponse
from router.http.asgi_response import Headers, error_headers

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata under `envoy.lb`, with the endpoint that a request is sent to."""
SERVED = "x-gateway-destination-endpoint-served"
"""Key of the metadata under `envoy.lb` with the endpoint that has answered."""
_SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_NAMESPACE = "envoy.lb"
_OVERWRITE = 2
"""HeaderAppendAction OVERWRITE_IF_EXISTS_OR_ADD"""
_PIECE_BYTES = 60_000
"""Most bytes of a body in one message: proxies limit the pieces of a stream to 64 KiB."""
_HOP_BY_HOP = frozenset({b"connection"})
"""Headers that a proxy writes itself."""


class ProtocolFault(ValueError):
    """A message that is against the protocol, or a mode that cannot be served; the text says which."""


class BodyMode(IntEnum):
    """Ways in which a proxy sends bodies (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class RequestHead(NamedTuple):
    """The first message about a request."""

    method: str
    path: str
    query: bytes
    headers: Headers
    """in lower case, without pseudo-headers"""
    ends: bool
    """there is no body"""
    request_mode: BodyMode
    response_mode: BodyMode
    subset: Subset | None
    """None: any endpoint may be chosen"""

    @property
    def address(self) -> str:
        """Address of the client: the last of x-forwarded-for, which the proxy itself has added; "": none."""
        for name, value in reversed(self.headers):
            if name == b"x-forwarded-for":
                return value.decode("latin-1").rpartition(",")[2].strip()
        return ""


class AnswerHead(NamedTuple):
    """The first message about an answer."""

    status: int
    """0: not stated"""
    content_type: str
    encoded: bool
    """its body is compressed"""
    ends: bool


def kind_of(message: Message) -> str | None:
    """Return the name of the message's content, e.g. `request_body`; None: it is unknown here."""
    kind: str | None = message.WhichOneof("request")
    return kind


def read_head(message: Any) -> RequestHead:
    """Return the head of a request. ProtocolFault when the message has none, or no answer is expected."""
    if kind_of(message) != "request_headers":
        raise ProtocolFault(f"the first message must be request_headers, not {kind_of(message)}")
    if message.observability_mode:
        raise ProtocolFault("observability_mode ignores answers, so that no endpoint can be picked; unset it")
    about = message.request_headers
    headers = _headers(about.headers)
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    path, _, query = pseudo.get(b":path", b"").partition(b"?")
    duplex = BodyMode.FULL_DUPLEX_STREAMED  # which the protocol requires where proxies state no mode
    stated = message.HasField("protocol_config")
    config = message.protocol_config
    return RequestHead(
        pseudo.get(b":method", b"").decode("latin-1"),
        path.decode("latin-1"),
        query,
        [field for field in headers if not field[0].startswith(b":")],
        about.end_of_stream,
        _mode(config.request_body_mode) if stated else duplex,
        _mode(config.response_body_mode) if stated else duplex,
        _subset(message),
    )


def read_answer_head(message: Any) -> AnswerHead:
    """Return the head of an answer from its message."""
    headers = dict(_headers(message.response_headers.headers))
    status = headers.get(b":status", b"")
    return AnswerHead(
        int(status) if status.isdigit() and len(status) == 3 else 0,
        headers.get(b"content-type", b"").decode("latin-1"),
        headers.get(b"content-encoding", b"identity") != b"identity",
        message.response_headers.end_of_stream,
    )


def served_by(message: Any) -> str | None:
    """Return the endpoint that has answered, as far as the proxy says."""
    served = _metadata(message, _NAMESPACE, SERVED)
    return served.string_value if served is not None and served.string_value else None


def proceed(kind: str) -> Message:
    """Let the proxy continue with headers or a body, unchanged. kind: of its message."""
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def answer_named(headers: Headers) -> Message:
    """Let the proxy continue with an answer's head, with these headers."""
    answer = ProcessingResponse()
    _set(answer.response_headers.response.header_mutation, headers)
    return answer


def picked(kind: str, endpoint: str, changes: Headers, removed: Iterable[bytes]) -> Any:
    """Name the endpoint of a request. kind: `request_headers`, or `request_body` for a buffered body.

    changes: further headers to set. removed: headers to remove.
    """
    answer = ProcessingResponse()
    common = getattr(answer, kind).response
    common.clear_route_cache = True
    _set(common.header_mutation, [(DESTINATION.encode(), endpoint.encode()), *changes])
    common.header_mutation.remove_headers.extend(name.decode("latin-1") for name in removed)
    answer.dynamic_metadata.update({_NAMESPACE: {DESTINATION: endpoint}})
    return answer


def streamed(kind: str, body: bytes, *, ends: bool) -> Iterator[Message]:
    """Send a body on, in pieces. kind: `request_body` or `response_body`. ends: it is complete."""
    for at in range(0, max(len(body), 1), _PIECE_BYTES):
        answer = ProcessingResponse()
        piece = getattr(answer, kind).response.body_mutation.streamed_response
        piece.body = body[at : at + _PIECE_BYTES]
        piece.end_of_stream = ends and at + _PIECE_BYTES >= len(body)
        yield answer


def refusal(error: ApiError, headers: Headers) -> Message:
    """Let the proxy answer with an error. headers: further headers of that answer."""
    own = [field for field in error_headers(error) if field[0] not in _HOP_BY_HOP]
    return immediate(error.status, error.body(), [*own, *headers], error.code or "refused")


def immediate(status: int, body: bytes, headers: Headers, details: str = "") -> Message:
    """Let the proxy answer at once. details: for its access log."""
    answer = ProcessingResponse()
    answer.immediate_response.status.code = status
    answer.immediate_response.body = body
    answer.immediate_response.details = details
    _set(answer.immediate_response.headers, headers)
    return answer


def _set(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value
        option.append_action = _OVERWRITE


def _mode(number: int) -> BodyMode:
    try:
        return BodyMode(number)
    except ValueError:
        raise ProtocolFault(f"body mode {number} is unknown here; use FULL_DUPLEX_STREAMED") from None


def _headers(headers: Any) -> Headers:
    return [
        (field.key.lower().encode(), field.raw_value or field.value.encode()) for field in headers.headers
    ]


def _subset(message: Any) -> Subset | None:
    """Return the subset of a request. Proxies state it as a list or as text with commas."""
    hint = _metadata(message, _SUBSET_NAMESPACE, _SUBSET)
    if hint is None:
        return None
    texts = [value.string_value for value in hint.list_value.values] or [hint.string_value]
    return Subset.of(endpoint.strip() for text in texts for endpoint in text.split(","))


def _metadata(message: Any, namespace: str, key: str) -> Any:
    """Return a value of the filter metadata; None: there is none."""
    for entry in message.metadata_context.filter_metadata:
        if entry.key == namespace and key in entry.value.fields:
            return entry.value.fields[key]
    return None
