"""Token ids that Roost requests with a client's own body, and takes out of the answer again. Pure.

A server that is asked (`return_token_ids`) fills in fields that are null otherwise, so null is put back. In a
stream it also sends steps of which the client sees nothing (a tool parser holds their text back); without ids
it leaves them out (`Continuable`).
"""

import re

import msgspec

from fleet.completions import UNREADABLE

FIELD = "return_token_ids"
_ASK = b'"return_token_ids":true'
_IDS = re.compile(
    rb'token_ids":(?:(?<="token_ids":)(?<!\\"token_ids":)|(?<="prompt_token_ids":)(?<!\\"prompt_token_ids":))'
    rb"\s*\[[0-9,\s]*\]"
)
"""The end of a key and its list. Within a string the quotes are escaped, so that texts never match. It begins
with a constant, for which the search is several times as fast.
"""
_OPEN = re.compile(rb'"(?<!\\")(?:prompt_)?token_ids":\s*(?:\[[0-9,\s]*)?\Z')
_KEYS = (b'"prompt_token_ids":', b'"token_ids":')


def asking(body: bytes) -> bytes:
    """Return a JSON object with a request for ids added; all other bytes stay unchanged. The object must have
    a field.
    """
    start = body.index(b"{") + 1
    return body[:start] + _ASK + b"," + body[start:]


def without_ids(data: bytes) -> bytes:
    """Return complete JSON, or complete events, with null in place of ids."""
    return _IDS.sub(b'token_ids":null', data)


class IdsFilter:
    """Takes ids out of JSON that arrives in pieces. State: bytes that may belong to a list of ids."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may be passed on. At the end, `rest` remains."""
        data = without_ids(self.rest + data)
        opened = _OPEN.search(data)
        cut = len(data) - _begun(data) if opened is None else opened.start()
        if cut and data[cut - 1 : cut] == b"\\":
            cut -= 1  # it tells if the quote after it begins a key
        ready, self.rest = data[:cut], data[cut:]
        return ready


def _begun(data: bytes) -> int:
    """Return the length of the longest end of the data with which a key begins."""
    for length in range(min(len(data), len(_KEYS[0])), 0, -1):
        if any(key.startswith(data[-length:]) for key in _KEYS):
            return length
    return 0


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


_ANSWER: msgspec.json.Decoder[_Answer] = msgspec.json.Decoder(_Answer)


def prompt_of(answer: bytes) -> list[int] | None:
    """Return the ids of the prompt in a complete answer of chat or completions; None without any."""
    try:
        found = _ANSWER.decode(answer)
    except UNREADABLE:
        return None
    return found.prompt_token_ids or next((one.prompt_token_ids for one in found.choices), None)
