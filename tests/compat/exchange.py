"""One HTTP exchange as bytes: sent, kept with the pieces it came in, and made comparable."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tests.compat.requests import ClientRequest

_OWN_HEADERS = re.compile("date|server|content-length|transfer-encoding|connection|x-request-id|x-roost-.*")
"""Of a connection, of a moment, or added by Roost; everything else must be equal."""
_VARYING = (
    (
        re.compile(
            rb'"((?:call_|chatcmpl-|cmpl-|resp_|msg_|rs_|embd-|modelperm-|tokenize-)?[0-9a-f-]{12,}[^"]*)"'
        ),
        b'"ID"',
    ),
    (re.compile(rb'"(?:resp|msg|rs|call|chatcmpl|cmpl|msg_resp)[-_][0-9A-Za-z_-]+"'), b'"ID"'),
    (re.compile(rb'"((?:created|completed)(?:_at)?)": ?[0-9.]+'), rb'"\1":0'),
    (re.compile(rb'"(cached_tokens|cache_read_input_tokens)": ?\d+'), rb'"\1":0'),
)


@dataclass(frozen=True)
class Answer:
    """What a server said. `pieces` are lengths in bytes of what arrived together."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    pieces: tuple[int, ...]

    @property
    def end_to_end(self) -> list[tuple[str, str]]:
        """Headers that belong to the answer itself, sorted."""
        return sorted((name, value) for name, value in self.headers if not _OWN_HEADERS.fullmatch(name))

    @property
    def comparable(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and body without ids, times and counts of cached tokens."""
        return self.status, self.end_to_end, neutral(self.body)


def neutral(body: bytes) -> bytes:
    """A body without what differs between two equal requests: ids, times, cached counts."""
    for pattern, instead in _VARYING:
        body = pattern.sub(instead, body)
    return body


async def ask(client: httpx.AsyncClient, base: str, sent: ClientRequest) -> Answer:
    """Send one request and read its answer as it comes. httpx.HTTPError when there is none."""
    async with client.stream(
        sent.method, base + sent.path, content=sent.body, headers=sent.headers
    ) as response:
        parts: Sequence[bytes] = [part async for part in response.aiter_raw()]
        return Answer(
            response.status_code, tuple(response.headers.items()), b"".join(parts), tuple(map(len, parts))
        )
