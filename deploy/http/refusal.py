"""Refusal of a request that exceeds a limit of its connection, or is not HTTP. Pure."""

from deploy.http.exchange import status_line
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
