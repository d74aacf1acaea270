"""A client's request to be forwarded to servers that take and return text. Pure."""

import msgspec

from router.fleet_state.target_table import RankKey
from router.foreign_api.headers import value_of
from router.foreign_api.lenient_fields import LenientRequest
from router.http.asgi_response import Headers
from router.prefix_index.prompt import Prompt


class ForeignPrompt(msgspec.Struct, frozen=True):
    """A request's prompt as far as the router knows it.

    prompt: by its ids where they are known, else by its text. asks: servers that return token ids are asked
    for them, and the client does not see them. continuable: fields of a large body with which its answer can
    be continued, as JSON; b"": they are not known.
    """

    prompt: Prompt
    asks: bool = False
    continuable: bytes = b""


class ForwardedRequest(msgspec.Struct, frozen=True):
    """A client's request as it will be forwarded."""

    method: str
    target: str
    """path and query"""
    headers: Headers
    body: bytes
    fields: LenientRequest
    read: ForeignPrompt
    output: int
    """expected tokens"""
    own_credentials: bool = True
    """this router requires no API key, so the client's key is meant for the servers"""
    repeatable: bool = True
    """a server that fails without an answer may have done nothing, so another server may be tried"""
    creates: bool = False
    """the answer names an object that stays on its server"""
    only: RankKey | None = None
    """server of the object that the request refers to"""

    @property
    def is_json(self) -> bool:
        """False for uploads."""
        return not value_of(self.headers, b"content-type").lower().startswith("multipart/")
