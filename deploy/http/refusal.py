"""Refusal of a request that exceeds a limit of its connection, or is not HTTP. Pure."""

from deploy.http.exchange import status_line
from deploy.http.limits import HttpLimits
from fleet.completions import ApiError


class Refusal(Exception):
    """Raised by the parser's callbacks. cause: as it is counted."""

    def __init__(self, status: int, cause: str, text: str) -> None:
        super().__init__(text)
        self.status, self.cause, self.text = status, cause, text

    def response(self) -> bytes:
        """Return the response that states the error, before the connection closes."""
        body = ApiError(self.status, self.text, code=self.cause).body()
        head = b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        return status_line(self.status) + head % len(body) + body


def too_many_connections() -> Refusal:
    return Refusal(503, "too_many_connections", "too many connections are open; try again later")


def malformed() -> Refusal:
    return Refusal(400, "malformed", "this is no HTTP/1.1 request that can be read")


def url_too_long(limits: HttpLimits) -> Refusal:
    return Refusal(414, "url_too_long", f"the URL is longer than {limits.url_bytes} bytes")


def too_many_fields(limits: HttpLimits) -> Refusal:
    return Refusal(431, "head_too_large", f"the head has more than {limits.head_fields} fields")


def head_too_large(limits: HttpLimits) -> Refusal:
    return Refusal(431, "head_too_large", f"the head is longer than {limits.head_bytes} bytes")


def chunk_head_too_large(_: HttpLimits) -> Refusal:
    return Refusal(400, "malformed", "too much between two chunks of the body")


def pipelined(most: int) -> Refusal:
    return Refusal(429, "pipelined", f"more than {most} requests wait on this connection; wait for answers")


def slow_head(limits: HttpLimits) -> Refusal:
    return Refusal(408, "slow_head", f"the head was not here after {limits.head_seconds:g} s")


def slow_body(limits: HttpLimits) -> Refusal:
    return Refusal(408, "slow_body", f"the body was not here after {limits.body_seconds:g} s")
