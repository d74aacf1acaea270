"""Status of a static backend, as `GET /v1/backends` returns it."""

from typing import Literal

import msgspec


class BackendSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a server, and its source. None: not known."""

    source: Literal["stated", "measured", "not measured"]
    prompt_tokens_per_second: float | None
    """uncached prompt tokens per second"""
    output_tokens_per_second: float | None
    """output tokens per second of a single stream"""


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One static backend, as this router process sees it."""

    name: str
    url: str
    state: str
    """"live", or why the backend gets no requests"""
    models: list[str]
    requests: int
    """open requests of this router, for all models together"""
    prefill_tokens: int
    """prompt tokens that are not computed yet"""
    max_requests: int
    speed: BackendSpeed
    isolates_tenants: bool = False
    """the server honours `cache_salt`; else tenants share its KV cache"""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/backends/{name}/drain`."""

    draining: bool = True
    reason: str = ""
