"""Conversion of a rank's chunks to the client's format: chat or completions, streamed or not. Pure; returns
bytes.
"""

import re
from typing import Protocol

import msgspec

from fleet.completions import ApiError, Choice, Logprobs, Usage, sse
from router.openai_api.request_schema import ChatRequest, Request

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


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
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


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` appears only if the client requested it, and is null in all chunks but the last."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """only for clients that requested return_token_ids"""


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a completion, or a complete one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields repeated in every chunk of one answer."""

    id: str
    model: str
    created: int


class ClientResponse(Protocol):
    """A client's answer in progress. Choices may arrive interleaved in any order."""

    content_type: bytes

    def add(self, index: int, choice: Choice) -> bytes:
        """Add a rank's output for one choice. Return the bytes to send now (none for an answer that is not
        streamed).
        """
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last bytes, after every choice has finished."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """Return the last bytes of an answer that has begun and cannot be finished."""
        ...


class _Streamed:
    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, head: ResponseHead, include_usage: bool) -> None:
        self._head = head
        self._usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET

    def broken(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"


class StreamedChat(_Streamed):
    """Streamed chat. Each choice begins with one chunk that names the role."""

    def __init__(self, head: ResponseHead, include_usage: bool) -> None:
        super().__init__(head, include_usage)
        self._begun: set[int] = set()

    def add(self, index: int, choice: Choice) -> bytes:
        begin = b""
        if index not in self._begun:
            self._begun.add(index)
            begin = self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        if not choice.text and choice.finish_reason is None and choice.logprobs is None:
            return begin
        delta = ChatDelta(content=choice.text or None)
        return begin + self._chunk(
            ChatChunkChoice(
                index=index,
                delta=delta,
                logprobs=ChatLogprobs.of(choice.logprobs),
                finish_reason=choice.finish_reason,
            )
        )

    def end(self, usage: Usage) -> bytes:
        last = b"" if self._usage is msgspec.UNSET else self._last(usage)
        return last + b"data: [DONE]\n\n"

    def _last(self, usage: Usage) -> bytes:
        return sse(
            ChatChunk(
                id=self._head.id, created=self._head.created, model=self._head.model, choices=[], usage=usage
            )
        )

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return sse(
            ChatChunk(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[choice],
                usage=self._usage,
            )
        )


class StreamedText(_Streamed):
    def __init__(self, head: ResponseHead, include_usage: bool, token_ids: bool) -> None:
        super().__init__(head, include_usage)
        self._token_ids = token_ids

    def add(self, index: int, choice: Choice) -> bytes:
        if (
            not choice.text
            and choice.finish_reason is None
            and choice.logprobs is None
            and not self._token_ids
        ):
            return b""
        text = TextChoice(
            index=index,
            text=choice.text,
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason,
            token_ids=self._ids(choice),
        )
        return sse(
            TextChunk(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[text],
                usage=self._usage,
            )
        )

    def end(self, usage: Usage) -> bytes:
        last = TextChunk(
            id=self._head.id, created=self._head.created, model=self._head.model, choices=[], usage=usage
        )
        return (b"" if self._usage is msgspec.UNSET else sse(last)) + b"data: [DONE]\n\n"

    def _ids(self, choice: Choice) -> list[int] | msgspec.UnsetType:
        return (choice.token_ids or []) if self._token_ids else msgspec.UNSET


class _Collected:
    """Parts of one choice of an answer that is not streamed."""

    __slots__ = ("finish_reason", "ids", "logprobs", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: str | None = None

    def add(self, choice: Choice) -> None:
        self.texts.append(choice.text)
        self.ids += choice.token_ids or ()
        if choice.logprobs is not None:
            self.logprobs.append(choice.logprobs)
        self.finish_reason = choice.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def joined_logprobs(self) -> Logprobs | None:
        if not self.logprobs:
            return None
        return Logprobs(
            tokens=[one for part in self.logprobs for one in part.tokens],
            token_logprobs=[one for part in self.logprobs for one in part.token_logprobs],
            top_logprobs=[one for part in self.logprobs for one in part.top_logprobs],
            text_offset=[one for part in self.logprobs for one in part.text_offset],
        )


class _Whole:
    content_type = b"application/json"

    def __init__(self, head: ResponseHead, choices: int) -> None:
        self._head = head
        self._choices = [_Collected() for _ in range(choices)]

    def add(self, index: int, choice: Choice) -> bytes:
        self._choices[index].add(choice)
        return b""

    def broken(self, error: ApiError) -> bytes:
        return error.body()


class ChatWhole(_Whole):
    def end(self, usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                index=at,
                message=Message(content=one.text),
                logprobs=ChatLogprobs.of(one.joined_logprobs),
                finish_reason=one.finish_reason,
            )
            for at, one in enumerate(self._choices)
        ]
        return msgspec.json.encode(
            ChatCompletion(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=choices,
                usage=usage,
            )
        )


class TextWhole(_Whole):
    def __init__(self, head: ResponseHead, choices: int, token_ids: bool) -> None:
        super().__init__(head, choices)
        self._token_ids = token_ids

    def end(self, usage: Usage) -> bytes:
        choices = [
            TextChoice(
                index=at,
                text=one.text,
                logprobs=one.joined_logprobs,
                finish_reason=one.finish_reason,
                token_ids=one.ids if self._token_ids else msgspec.UNSET,
            )
            for at, one in enumerate(self._choices)
        ]
        return msgspec.json.encode(
            TextChunk(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=choices,
                usage=usage,
            )
        )


def answer_for(request: Request, head: ResponseHead, choices: int) -> ClientResponse:
    """Return the response in the format that the client requested."""
    include_usage = request.stream_options is not None and request.stream_options.include_usage
    if isinstance(request, ChatRequest):
        return StreamedChat(head, include_usage) if request.stream else ChatWhole(head, choices)
    token_ids = bool(request.return_token_ids)
    return (
        StreamedText(head, include_usage, token_ids)
        if request.stream
        else TextWhole(head, choices, token_ids)
    )
