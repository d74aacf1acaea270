"""Continuation of a foreign server's stream at another server: records the ids as they pass, and builds the
request for the next server. Pure.

A stream is continued only if the answer stays exact: one choice of plain text from a server that returns
token ids. At temperature 0 the rest is the same on any server. A sampled answer without a seed is continued,
too: the next draw depends only on the tokens so far, so another server's random numbers are as good. With a
seed they are not, since they would start over.

The next server begins with prompt ids + emitted ids, at a position where the text of the ids equals the text
that the client has. At such a position there is no partial character, and no text held back by the first
server because a stop string might begin there. If that position lies before the last id, the next server
computes the ids in between again. Their text is compared with the text that the client already has and left
out. This requires temperature 0. Positions are found without a tokenizer (`_Mark`), or by requesting the text
of ids from a server (`fits`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from fleet.completions import DONE, UNREADABLE, sse
from router.foreign_api.continuable_fields import CONTINUED_FIELDS, obstacle, read_fields
from router.foreign_api.returned_ids import FIELD, asking, without_ids
from router.http.server_sent_events import event_data
from router.openai_api.request_schema import CHAT_PATH

UNKNOWN_CONTEXT = 2**31 - 1
MAX_POSITIONS = 16
"""Most positions for which a server's text is requested, from the last id backwards."""
MAX_IDS = 1 << 20
"""Most ids of an answer without a known limit."""
_TEXT_DEFAULT = 16
"""Tokens of a completion that states no limit."""
_CONTEXT_IDS = 32
"""Prompt ids sent before the answer's ids, since detokenizers look back a few ids."""
_HALF = "\ufffd"
_EMPTY, _LOGPROBS = b'"delta":{}', b'"logprobs":{'


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] = {}
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class _Chunk(msgspec.Struct):
    id: Any = None
    created: Any = None
    model: Any = None
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_CHUNK: msgspec.json.Decoder[_Chunk] = msgspec.json.Decoder(_Chunk)


class InexactContinuation(Exception):
    """The rest of an answer would not be exact. The text gives the reason."""


class _Mark(NamedTuple):
    """Position at which text and ids agree: a single id produced text that ends in no partial character, so
    nothing is held back.
    """

    ids: int
    characters: int


class Continuable:
    """One stream, across servers. `obstacle`: reason why it cannot be continued; None: no reason is known."""

    def __init__(
        self, path: str, body: bytes, context: int, *, asks: bool = False, fields: bytes = b""
    ) -> None:
        """context: context length of the model in tokens; UNKNOWN_CONTEXT if no server reports it. asks: ids
        are requested even if the stream cannot be continued. fields: the body's `read_fields` as JSON, if
        they are known.
        """
        self._chat = path == CHAT_PATH
        self._fields = msgspec.json.decode(fields) if fields else read_fields(body)
        self._context = context
        self._body = body
        self.obstacle = obstacle(self._fields, chat=self._chat)
        self.broken: str | None = None
        """reason why the present server's stream has become useless before its end"""
        self.finished = False
        """True once the finish reason has arrived"""
        self.prompt: list[int] | None = None
        self.ids: list[int] = []
        """ids of the answer computed so far"""
        self.other_ids = 0
        """number of ids that came after it was known that the answer cannot be continued"""
        self._parts: list[str] = []
        """pieces of the text that the client has"""
        self._characters = 0
        self._given: list[int] = []
        """ids that the client has, if it requested them"""
        self._ask = (asks or self.obstacle is None) and FIELD not in self._fields
        self._shows_ids = bool(self._fields.get(FIELD))
        self._stops = bool(self._fields.get("stop"))
        self._mark = _Mark(0, 0)
        """the last mark"""
        self._head: dict[str, Any] = {}
        self._counted = False
        """True once usage has arrived"""
        self._continued = False
        self._base = 0
        """number of the answer's ids in the present server's prompt"""
        self._known_text = ""
        self._known_ids: list[int] = []
        """ids that the client already has and the present server computes again"""

    def body(self) -> bytes:
        """Return the client's body with a request for ids added. All other bytes stay unchanged."""
        return asking(self._body) if self._ask else self._body

    @property
    def text(self) -> str:
        """Text that the client has."""
        return "".join(self._parts)

    @property
    def begun(self) -> bool:
        """True once something has arrived that only a continuation can keep."""
        return bool(self.ids) or self.finished or self.obstacle is not None

    # Events that pass

    def take(self, events: bytes) -> bytes:
        """Record complete events of the present server. Return the bytes for the client. Once `broken` is
        set, stop reading.
        """
        passed = []
        *whole, rest = events.split(b"\n\n")
        if rest:  # an event too long to be read, or other line ends
            self.obstacle = self.obstacle or "its events cannot be read"
        for event in whole:
            try:
                passed.append(
                    self._from_continuing_server(event) if self._continued else self._from_first_server(event)
                )
            except InexactContinuation as inexact:
                self.broken = str(inexact)
                return b"".join(passed)
        return b"".join([*passed, rest])

    def _from_first_server(self, event: bytes) -> bytes:
        """Translate an event of the first server for the client. InexactContinuation at an error, if another
        server can continue.
        """
        try:
            chunk = _chunk(event)
        except InexactContinuation as inexact:
            self.obstacle = self.obstacle or str(inexact)
            return event + b"\n\n"
        if chunk is None:
            return event + b"\n\n"
        if self.prompt is None:
            of_choices = (choice.prompt_token_ids for choice in chunk.choices)
            self.prompt = chunk.prompt_token_ids or next(of_choices, None)
        if self.obstacle is not None:
            self.other_ids += sum(len(choice.token_ids or ()) for choice in chunk.choices)
        else:
            if chunk.error is not None and self.begun and self.why_not() is None:
                raise InexactContinuation("the server ended the stream with an error")
            self._head = self._head or {"id": chunk.id, "created": chunk.created, "model": chunk.model}
            self._counted = self._counted or (chunk.usage is not None and not chunk.choices)
            for choice in chunk.choices:
                self._add(choice, (choice.delta.get("content") or "") if self._chat else choice.text)
                self._given = self.ids
        if not self._ask:
            return event + b"\n\n"
        if _EMPTY in event and _says_nothing(event, chunk):
            return b""
        return without_ids(event) + b"\n\n"

    def _add(self, choice: _Choice, text: str) -> None:
        """Record a piece of the answer, with the text that is new to the client."""
        ids = choice.token_ids
        other = [name for name, value in choice.delta.items() if name not in ("role", "content") and value]
        if other or choice.index:
            self.obstacle = f"it has {', '.join(other) or 'several choices'} beside text"
        elif text and ids is None:
            self.obstacle = "the server returns no token ids"
        self.ids += ids or ()
        if len(self.ids) > (self._limit() or MAX_IDS):
            self.obstacle = "the server sent more tokens than requested"
        self._parts.append(text)
        self._characters += len(text)
        if (
            text
            and ids is not None
            and len(ids) == 1
            and text == (choice.delta.get("content") or choice.text)
            and not self._stops
            and not text.endswith(_HALF)
        ):
            self._mark = _Mark(len(self.ids), self._characters)
        self.finished = self.finished or choice.finish_reason is not None

    def _from_continuing_server(self, event: bytes) -> bytes:
        """Translate an event of a continuing server into the form of the client's own stream.
        InexactContinuation if the event cannot belong to the rest.
        """
        chunk = _chunk(event)
        if chunk is None:
            return event + b"\n\n"  # a comment, or the end
        if chunk.error is not None:
            raise InexactContinuation("the server ended the stream with an error")
        if chunk.usage is not None and not chunk.choices:
            return self._usage(int(chunk.usage.get("completion_tokens") or 0))
        return b"".join(map(self._continuing, chunk.choices))

    def _continuing(self, choice: _Choice) -> bytes:
        # The server repeats what the client has. Text and ids are compared separately, because a server may
        # hold back text whose ids it has sent.
        shared = min(len(choice.text), len(self._known_text))
        ids = choice.token_ids or []
        again = min(len(ids), len(self._known_ids))
        if choice.text[:shared] != self._known_text[:shared] or ids[:again] != self._known_ids[:again]:
            self.obstacle = "another server computes text that differs from what the client already has"
            raise InexactContinuation(self.obstacle)
        self._known_text, self._known_ids = self._known_text[shared:], self._known_ids[again:]
        text, fresh = choice.text[shared:], ids[again:]
        if choice.finish_reason is not None and (self._known_text or self._known_ids):
            self.obstacle = "another server ends the answer before the text that the client already has"
            raise InexactContinuation(self.obstacle)
        self._add(choice, text)
        self._given = self.ids if len(self.ids) > len(self._given) else self._given
        return self._piece(text, fresh, choice) if text or fresh or choice.finish_reason is not None else b""

    def _piece(self, text: str, ids: list[int], choice: _Choice) -> bytes:
        about: dict[str, Any] = (
            {"index": 0, "delta": {"content": text}} if self._chat else {"index": 0, "text": text}
        )
        about |= {"logprobs": None, "finish_reason": choice.finish_reason}
        if choice.finish_reason is not None or not self._chat:
            about["stop_reason"] = choice.stop_reason
        about |= {} if self._chat else {"prompt_token_ids": None}
        return self._event({"choices": [about | {"token_ids": ids if self._shows_ids else None}]})

    def _usage(self, completion: int) -> bytes:
        """Return the usage: the client's own prompt, and the tokens of all servers. completion: those of the
        present one.
        """
        self._counted = True
        prompt, completion = len(self.prompt or ()), self._base + completion
        counts = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        return self._event({"choices": [], "usage": counts})

    def _event(self, more: Mapping[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {
            "id": self._head.get("id"),
            "object": kind,
            "created": self._head.get("created"),
            "model": self._head.get("model"),
        }
        return sse({**head, **more})

    # Request to the next server

    def why_not(self) -> str | None:
        """Return the reason why the stream cannot be continued now, or None."""
        if self.obstacle is None and self.prompt is None:
            return "the server returned no token ids"
        if self.obstacle is None and self._limit() is None:
            return "it states no max_tokens, and the context length of its model is unknown"
        return self.obstacle

    def positions(self) -> range:
        """Return the numbers of ids after which a continuation may begin and whose text must be requested.
        Empty if the last position is known to be right.
        """
        if self._mark == _Mark(len(self.ids), self._characters):
            return range(0)
        return range(len(self.ids), max(self._mark.ids, len(self.ids) - MAX_POSITIONS), -1)

    def context_of(self, ids: int) -> list[int]:
        """Return the ids whose text to request: the end of the prompt, and the first `ids` of the answer."""
        return (self.prompt or [])[-_CONTEXT_IDS:] + self.ids[:ids]

    def fits(self, ids: int, before: str, text: str) -> bool:
        """Return True if the answer can be continued after `ids` ids. before, text: the texts of
        `context_of(0)` and of `context_of(ids)`.
        """
        own = text[len(before) :]
        if not text.startswith(before) or not self.text.startswith(own) or own.endswith(_HALF):
            return False
        self._mark = _Mark(ids, len(own))
        return True

    def request(self) -> bytes | None:
        """Return the body for the next server's /v1/completions; None if all tokens have arrived and only the
        end is missing. InexactContinuation if the rest would not be exact.
        """
        mark, limit = self._mark, self._limit()
        assert self.prompt is not None
        assert limit is not None
        again_text, again_ids = (
            self.text[mark.characters :],
            self._given[mark.ids :] if self._shows_ids else [],
        )
        if (again_text or again_ids) and self._fields.get("temperature") != 0:
            raise InexactContinuation(
                "it is sampled, and no position is known where the client's text ends with a complete token"
            )
        if self.finished or mark.ids >= limit:
            return None
        self._known_text, self._known_ids = again_text, again_ids
        self.ids, self._base, self._continued, self.broken = self.ids[: mark.ids], mark.ids, True, None
        fields = {
            name: value
            for name, value in self._fields.items()
            if name in CONTINUED_FIELDS and value is not None
        }
        return msgspec.json.encode(
            {
                **fields,
                "prompt": self.prompt + self.ids,
                "max_tokens": limit - mark.ids,
                "return_token_ids": True,
            }
        )

    def ending(self) -> bytes:
        """Return the end of an answer whose tokens have all arrived."""
        end = b"" if self.finished else self._piece("", [], _Choice(finish_reason="length"))
        options = self._fields.get("stream_options") or {}
        counted = (
            self._usage(len(self.ids) - self._base)
            if options.get("include_usage") and not self._counted
            else b""
        )
        return end + counted + DONE

    @property
    def remaining(self) -> int:
        """Return the number of tokens that may still come."""
        limit = self._limit()
        return 1 if limit is None else max(1, limit - len(self.ids))

    def _limit(self) -> int | None:
        """Return the token limit of the entire answer, or None if it is unknown."""
        for name in ("max_completion_tokens", "max_tokens") if self._chat else ("max_tokens",):
            value = self._fields.get(name)
            if type(value) is int:
                return value
        if not self._chat:
            return _TEXT_DEFAULT
        return (
            None
            if self._context >= UNKNOWN_CONTEXT or self.prompt is None
            else self._context - len(self.prompt)
        )


def _says_nothing(event: bytes, chunk: _Chunk) -> bool:
    """Return True for steps of a chat that are sent only because ids were requested."""
    return _LOGPROBS not in event and all(
        not choice.delta and choice.finish_reason is None and choice.token_ids is not None
        for choice in chunk.choices
    )


def _chunk(event: bytes) -> _Chunk | None:
    """Parse an event. None for comments and [DONE]. InexactContinuation for an unreadable event."""
    data = event_data(event)
    if b"{" not in data:
        return None
    try:
        return _CHUNK.decode(data)
    except UNREADABLE as error:
        raise InexactContinuation(f"an event is no chunk of an answer: {error}") from error
