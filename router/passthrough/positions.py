"""Search for the position at which another server can continue a stream: the server detokenises the last
ids."""

import logging

import msgspec

from fleet.completions import ApiError
from router.foreign_api.continuation import Continuable
from router.http.asgi_response import Headers
from router.upstream.rank_client import Patience, Upstream, UpstreamFailed, UpstreamRequest

log = logging.getLogger(__name__)

_SECONDS = 5.0
"""timeout of one request"""
_MAX_BYTES = 1024 * 1024
"""size limit of one answer"""


class _Detokenized(msgspec.Struct):
    prompt: str


_DETOKENIZED: msgspec.json.Decoder[_Detokenized] = msgspec.json.Decoder(_Detokenized)


async def find_position(
    continuable: Continuable, upstream: Upstream, url: str, headers: Headers, model: str
) -> None:
    """Query the server until the client's text is found. If the server cannot detokenise, the known position
    is kept.
    """
    try:
        before = await _text_of(continuable.context_of(0), upstream, url, headers, model)
        for ids in continuable.positions():
            text = await _text_of(continuable.context_of(ids), upstream, url, headers, model)
            if continuable.fits(ids, before, text):
                return
    except (UpstreamFailed, ApiError, ValueError) as error:
        log.info("%s does not detokenise ids: %s", url, error)


async def _text_of(ids: list[int], upstream: Upstream, url: str, headers: Headers, model: str) -> str:
    """Return the text of ids. ValueError when the server's /detokenize returns no text; UpstreamFailed or
    ApiError when it does not answer.
    """
    sent = UpstreamRequest(
        "POST", url, "/detokenize", headers, msgspec.json.encode({"model": model, "tokens": ids})
    )
    async with upstream.forward(sent, stream=False, patience=Patience(_SECONDS, _SECONDS, _SECONDS)) as call:
        answer = b""
        while data := await call.read():
            answer += data
            if len(answer) > _MAX_BYTES:
                raise ValueError(f"its answer exceeds {_MAX_BYTES} bytes")
        call.whole()
        if call.status != 200:
            raise ValueError(f"HTTP {call.status}")
        return _DETOKENIZED.decode(answer).prompt
