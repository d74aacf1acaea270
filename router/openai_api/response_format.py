"""Conversion of a rank's chunks to the client's format: chat or completions, streamed or not. Pure; returns
bytes.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from fleet.completions import DONE, Choice, Logprobs, Usage, sse
from router.openai_api.request_schema import ChatRequest, Request

_ENCODER = msgspec.json.Encoder()
_MARK = "the text"
"""Text that stands for the text of a chunk, and comes last among its strings."""
_RAW = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")


def token_bytes(name: str) -> list[int]:
    r"""Return a token's bytes by its name in log-probabilities: its text, or `bytes:\xe2...`, the name that
    ranks use for a token that is not valid UTF-8 alone.
    """
    if _RAW.fullmatch(name):
        return list(bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")))
    return list(name.encode())


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the chat API: one entry per token with its alternatives."""

    content: list[TokenLogprob]

    @classmethod
    def of(cls, given: Logprobs | None) -> "ChatLogprobs | None":
        if given is None:
            return None
        return cls(
            content=[
                TokenLogprob(
                    token=token,
                    logprob=value,
                    bytes=token_bytes(token),
                    top_logprobs=[_top(*one) for one in top.items()],
                )
                for token, value, top in zip(
                    given.tokens, given.token_logprobs, given.top_logprobs, strict=True
                )
            ]
        )


def _top(token: str, value: float) -> TopLogprob:
    return TopLogprob(token=token, logprob=value, bytes=token_bytes(token))


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """only for clients that requested return_token_ids"""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer, or one chunk of a stream. `usage` appears in chunks only if the client requested it,
    and is null in all chunks but the last.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChunkChoice | ChatChoice | TextChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields repeated in every chunk of one answer."""

    id: str
    model: str
    created: int


class ChatFormat:
    """Choices of the chat API."""

    chunk_object, answer_object = "chat.completion.chunk", "chat.completion"
    token_ids = False

    def first(self, index: int) -> ChatChunkChoice | None:
        """Return the chunk that begins a choice; None: there is none."""
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def chunk(self, index: int, choice: Choice) -> ChatChunkChoice:
        """Return a rank's piece of a choice."""
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=choice.text or None),
            logprobs=ChatLogprobs.of(choice.logprobs),
            finish_reason=choice.finish_reason,
        )

    def complete(self, index: int, choice: Choice) -> ChatChoice:
        """Return a complete choice."""
        return ChatChoice(
            index=index,
            message=Message(content=choice.text),
            logprobs=ChatLogprobs.of(choice.logprobs),
            finish_reason=choice.finish_reason,
        )


class TextFormat:
    """Choices of the completions API, whose chunks have the form of complete choices."""

    chunk_object = answer_object = "text_completion"

    def __init__(self, token_ids: bool) -> None:
        self.token_ids = token_ids

    def first(self, index: int) -> None:
        return None

    def chunk(self, index: int, choice: Choice) -> TextChoice:
        return TextChoice(
            index=index,
            text=choice.text,
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason,
            token_ids=(choice.token_ids or []) if self.token_ids else msgspec.UNSET,
        )

    complete = chunk


class ClientResponse(Protocol):
    """A client's answer in progress. Choices may arrive interleaved in any order."""

    content_type: bytes

    def add(self, index: int, choice: Choice) -> bytes:
        """Add a rank's output for one choice. Return the bytes to send now (none for an answer that is not
        streamed).
        """
        ...

    def add_tokens(self, index: int, ids: list[int], text: str) -> bytes:
        """Do the same as `add` for output that has nothing but ids and text."""
        ...

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes of a chunk of nothing but text, before and after it. None: such a chunk must not
        be sent now.
        """
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last bytes, after every choice has finished."""
        ...


class StreamedResponse:
    """Chunks as server-sent events. A chunk that would say nothing is left out."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, form: ChatFormat | TextFormat, head: ResponseHead, include_usage: bool) -> None:
        self._form = form
        self._head = head
        self._usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET
        self._around: dict[int, tuple[bytes, bytes] | None] = {}
        """bytes of a begun choice's chunks before and after their text, once they were needed"""

    def add_tokens(self, index: int, ids: list[int], text: str) -> bytes:
        around = self.around(index)
        if around is None:
            return self.add(index, Choice(text=text, token_ids=ids))
        return b"%b%b%b" % (around[0], _ENCODER.encode(text), around[1]) if text else b""

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        if self._form.token_ids or index not in self._around:
            return None
        if self._around[index] is None:
            chunk = self._event([self._form.chunk(index, Choice(text=_MARK))], self._usage)
            before, _, after = chunk.rpartition(_ENCODER.encode(_MARK))  # a model's name can contain it, too
            self._around[index] = before, after
        return self._around[index]

    def add(self, index: int, choice: Choice) -> bytes:
        begin = b""
        if index not in self._around:
            self._around[index] = None
            first = self._form.first(index)
            begin = b"" if first is None else self._event([first], self._usage)
        says = choice.text or choice.finish_reason is not None or choice.logprobs is not None
        if not says and not self._form.token_ids:
            return begin
        return begin + self._event([self._form.chunk(index, choice)], self._usage)

    def end(self, usage: Usage) -> bytes:
        return (b"" if self._usage is msgspec.UNSET else self._event([], usage)) + DONE

    def _event(
        self, choices: list[ChatChunkChoice | TextChoice], usage: Usage | msgspec.UnsetType | None
    ) -> bytes:
        head = self._head
        return sse(
            AnswerBody(
                id=head.id,
                object=self._form.chunk_object,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage,
            )
        )


class CompleteResponse:
    """One JSON body, once every choice has finished. State: the pieces of each choice."""

    content_type = b"application/json"

    def __init__(self, form: ChatFormat | TextFormat, head: ResponseHead, choices: int) -> None:
        self._form = form
        self._head = head
        self._pieces: list[list[Choice]] = [[] for _ in range(choices)]

    def add(self, index: int, choice: Choice) -> bytes:
        self._pieces[index].append(choice)
        return b""

    def add_tokens(self, index: int, ids: list[int], text: str) -> bytes:
        return self.add(index, Choice(text=text, token_ids=ids))

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        return None

    def end(self, usage: Usage) -> bytes:
        head, form = self._head, self._form
        choices = [form.complete(at, _joined(pieces)) for at, pieces in enumerate(self._pieces)]
        return msgspec.json.encode(
            AnswerBody(
                id=head.id,
                object=form.answer_object,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage,
            )
        )


def _joined(pieces: list[Choice]) -> Choice:
    """Join the pieces of one choice."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Choice(
        text="".join(piece.text for piece in pieces),
        token_ids=[one for piece in pieces for one in piece.token_ids or ()],
        logprobs=Logprobs(
            tokens=[one for part in logprobs for one in part.tokens],
            token_logprobs=[one for part in logprobs for one in part.token_logprobs],
            top_logprobs=[one for part in logprobs for one in part.top_logprobs],
            text_offset=[one for part in logprobs for one in part.text_offset],
        )
        if logprobs
        else None,
        finish_reason=next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), None),
    )


def answer_for(request: Request, head: ResponseHead, choices: int) -> ClientResponse:
    """Return the response in the format that the client requested."""
    form = ChatFormat() if isinstance(request, ChatRequest) else TextFormat(bool(request.return_token_ids))
    if not request.stream:
        return CompleteResponse(form, head, choices)
    include_usage = request.stream_options is not None and request.stream_options.include_usage
    return StreamedResponse(form, head, include_usage)
