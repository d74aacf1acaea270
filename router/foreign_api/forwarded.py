"""A client's request on its way to servers that speak text. Pure."""

import msgspec

from router.fleet_state.target_table import RankKey
from router.foreign_api.headers import value_of
from router.foreign_api.lenient_fields import LenientRequest
from router.http.asgi_response import Headers


class ForwardedRequest(msgspec.Struct, frozen=True):
    """A client's request as it will be sent on."""

    method: str
    target: str
    """path and query"""
    headers: Headers
    body: bytes
    asked: LenientRequest
    output: int
    """tokens that are expected"""
    own_credentials: bool = True
    """this router asks its clients for no key: theirs are meant for the servers"""
    repeatable: bool = True
    """a server that fails without an answer may have done nothing, and another one may be asked"""
    creates: bool = False
    """the answer names an object that stays on its server"""
    only: RankKey | None = None
    """the server of what the request refers to"""

    @property
    def is_json(self) -> bool:
        """False for uploads."""
        return not value_of(self.headers, b"content-type").lower().startswith("multipart/")
