"""HTTP client of a server that Roost does not run."""

from typing import TypeVar

import aiohttp
import msgspec

from engine_adapter.engine import EngineFailed

MAX_BYTES = 16 * 1024 * 1024
"""Longest answer that is read."""
Answer = TypeVar("Answer")


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    parent: str | None = None
    """Base model of a LoRA adapter."""


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


class ServerClient:
    """One base URL. Every question is asked on a new connection: an open one could hide a dead server.
    EngineFailed when the server does not answer, refuses the key, or answers what its kind does not."""

    kind = "OpenAI-compatible"
    """Kind of the server, for error messages."""

    def __init__(self, base: str, api_key: str | None, seconds: float) -> None:
        """seconds: time limit of one request."""
        self.base = base
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    async def models(self) -> tuple[ModelCard, ...]:
        return self._decoded("/v1/models", await self._get("/v1/models"), _Models).data

    def _decoded(self, path: str, body: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(body, type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineFailed(f"{self.base}{path} is not {self.kind}'s: {error}") from error

    async def _get(self, path: str, *, missing: bytes | None = None) -> bytes:
        """Return the body of an answer. missing: the value for HTTP 404."""
        url = f"{self.base}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.get(url, headers=self._headers, allow_redirects=False) as answer,
            ):
                body = await self._limited(answer, url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{url} does not answer: {error or 'timed out'}") from error
        if answer.status == 404 and missing is not None:
            return missing
        if answer.status in (401, 403):
            raise EngineFailed(
                f"{url} refuses the key (HTTP {answer.status}); give the right one with --api-key-file"
            )
        if answer.status != 200:
            raise EngineFailed(f"{url} answers HTTP {answer.status}; is this a {self.kind} server?")
        return body

    async def _limited(self, answer: aiohttp.ClientResponse, url: str) -> bytes:
        body = b""
        async for piece in answer.content.iter_chunked(65536):
            body += piece
            if len(body) > MAX_BYTES:
                raise EngineFailed(f"{url} is not {self.kind}'s: it is longer than {MAX_BYTES} bytes")
        return body
