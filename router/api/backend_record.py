"""A static backend as it is read: what `GET /v1/backends` answers."""

from typing import Literal

import msgspec


class BackendSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a server is, and how that is known. None: it is not."""

    source: Literal["stated", "measured", "not measured"]
    prompt_tokens_per_second: float | None
    """uncached prompt tokens"""
    output_tokens_per_second: float | None
    """of one stream alone"""


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One static backend, as this router process sees it."""

    name: str
    url: str
    state: str
    """"live", or why it gets no requests"""
    models: list[str]
    requests: int
    """that this router has there, for all models together"""
    prefill_tokens: int
    """prompt tokens that are not computed yet"""
    max_requests: int
    speed: BackendSpeed
    isolates_tenants: bool = False
    """it takes `cache_salt`; else tenants share its KV cache"""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/backends/{name}/drain`"""

    draining: bool = True
    reason: str = ""
