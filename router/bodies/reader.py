"""Requests and the token ids of their prompts, read from bodies in the place that blocks the event loop
least.

Small bodies are read on the event loop. Their long texts are tokenised in a thread, whose encoder releases
the GIL. Bodies beyond `large_body_bytes` go to worker processes: decoding and rendering them would hold the
GIL for milliseconds, in any thread.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec

from fleet.completions import ApiError
from router.access.tenancy import SALT_FIELD, with_salt
from router.bodies import tasks
from router.bodies.fair_turns import FairTurns
from router.bodies.tasks import EncodedPrompt, Kind, PromptBounds
from router.bodies.worker_pool import BodyWorkers
from router.config import RouterConfig
from router.foreign_api import lenient_fields
from router.foreign_api.lenient_fields import LenientRequest
from router.foreign_api.prompt_fields import read_prompt
from router.openai_api.request_schema import ChatRequest, Request, binding_fields, passed_fields
from router.openai_api.unserved_fields import PassedFields
from router.tokenization.tokenizer import ModelTokenizer
from router.tokenization.tokenizer_registry import TokenizerRegistry

_MOST_THREADS = 16
"""unless the settings name more"""
_CLIENT_PART = 4
"""One client may have this part of the large bodies that wait: a quarter."""
_MAX_WAITING = 4096
"""limit of texts that wait for a thread"""
_Result = TypeVar("_Result")


class Decoded(msgspec.Struct, frozen=True):
    """A request and its body. is_large: `request` is abridged, and the worker that makes the ids reads the
    body again.
    """

    kind: Kind
    body: bytes
    request: Request
    is_large: bool


class BodyReader:
    """Threads and processes that tokenise. Processes end with the context; outside of it large bodies are
    refused.

    `client` identifies a queue of the fair queueing: a tenant, or an address.
    """

    def __init__(self, config: RouterConfig, registry: TokenizerRegistry) -> None:
        self._large = config.large_body_bytes
        self._long = config.long_prompt_characters
        threads = config.tokenizer_threads or min(os.cpu_count() or 1, _MOST_THREADS)
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="roost-tokenise")
        self._turns = FairTurns("prompts", threads, _MAX_WAITING, _MAX_WAITING // 2)
        self._stack = AsyncExitStack()
        self.workers = BodyWorkers(
            config.large_body_processes,
            config.large_bodies_waiting,
            max(1, config.large_bodies_waiting // _CLIENT_PART),
            memory_bytes=config.large_body_process_bytes,
            seen_bytes=config.segment_cache_bytes // config.large_body_processes,
            archive=registry.archive,
            digests=lambda: registry.digests,
        )

    async def __aenter__(self) -> "BodyReader":
        self._stack.callback(self.threads.shutdown, wait=False, cancel_futures=True)
        await self._stack.enter_async_context(self.workers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def read(self, client: str, kind: Kind, body: bytes) -> Decoded:
        """Decode a body. ApiError 400 names the field; 429 and 503 when too many large bodies wait."""
        if len(body) <= self._large:
            return Decoded(kind, body, tasks.decode(kind, body), is_large=False)
        return Decoded(kind, body, await self.workers.read(client, kind, body), is_large=True)

    async def read_passthrough(self, client: str, body: bytes, content_type: str) -> LenientRequest:
        """Read the fields that routing uses of a request to a server that speaks text. ApiError 429 and 503
        as in `read`.
        """
        if len(body) <= self._large:
            return lenient_fields.read(body, content_type)
        return await self.workers.read_passthrough(client, content_type, body)

    async def passed_fields(self, client: str, decoded: Decoded) -> PassedFields:
        """Return the fields of the request that are forwarded unchanged. ApiError as in `read`."""
        if not decoded.is_large:
            return passed_fields(decoded.request, decoded.body)
        values = await self.workers.read_passed(client, decoded.kind, decoded.body)
        return PassedFields(values, binding_fields(decoded.request))

    async def with_salt(self, client: str, body: bytes, salt: str) -> bytes:
        """Replace the salt of a body, as `tenancy.with_salt`. ApiError as in `read`."""
        if len(body) <= self._large or SALT_FIELD not in body:
            return with_salt(body, salt)
        return await self.workers.with_salt(client, body, salt)

    async def ids(
        self,
        client: str,
        decoded: Decoded,
        tokenizer: ModelTokenizer,
        digest: str,
        room: PromptBounds,
        scope: str = "",
    ) -> list[list[int]]:
        """Return the token ids of each prompt. scope: of texts whose cached ids may be reused
        (`ModelTokenizer.within`).

        ApiError 400 for a prompt without ids, or that does not fit; 429 and 503 as in `read`.
        """
        request, tokenizer = decoded.request, tokenizer.within(scope)
        if decoded.is_large:
            return await self.workers.encode(client, decoded.kind, decoded.body, digest, room, scope)
        if len(decoded.body) <= self._long:
            return tasks.ids_of(request, tokenizer, room)
        if not isinstance(request, ChatRequest):
            return await self._in_thread(client, lambda: tasks.ids_of(request, tokenizer, room))
        segments = tokenizer.segments(tasks.rendered(request, tokenizer, room))
        if segments.unknown > self._long:
            ids = await self._in_thread(client, lambda: tokenizer.encode_segments(segments))
        else:
            ids = tokenizer.encode_segments(segments)
        tasks.refuse_longer(len(ids), room, "messages")
        return [ids]

    async def foreign_prompt(
        self,
        client: str,
        body: bytes,
        tokenizer: ModelTokenizer,
        digest: str,
        context: int,
        scope: str,
        *,
        chat: bool,
    ) -> EncodedPrompt | None:
        """Make the ids of the prompt of a body for a server that gets text; None if they cannot be known
        here. Never refuses: a large body for which there is no turn has no ids.
        """
        if len(body) > self._large:
            try:
                return await self.workers.foreign_prompt(client, body, digest, context, scope, chat=chat)
            except ApiError:
                return None
        tokenizer = tokenizer.within(scope)
        if len(body) <= self._long:
            return tasks.foreign_prompt(body, tokenizer, context, chat=chat)
        fields = read_prompt(body, chat=chat)
        text = None if fields is None else tasks.foreign_text(fields, tokenizer, context)
        if fields is None or text is None:
            return None
        if isinstance(text, list) or (chat and tokenizer.segments(text).unknown <= self._long):
            return tasks.foreign_ids(fields, text, tokenizer)
        try:
            return await self._in_thread(client, lambda: tasks.foreign_ids(fields, text, tokenizer))
        except ApiError:
            return None

    async def _in_thread(self, client: str, work: Callable[[], _Result]) -> _Result:
        """Run work in a thread in the client's turn. The slot is held until the work is done, even if the
        client disconnects.
        """
        await self._turns.take(client)
        try:
            running = asyncio.get_running_loop().run_in_executor(self.threads, work)
        except BaseException:
            self._turns.give_back()
            raise
        running.add_done_callback(self._thread_ended)
        return await asyncio.shield(running)

    def _thread_ended(self, running: "asyncio.Future[_Result]") -> None:
        if not running.cancelled():
            running.exception()  # marks it as retrieved: the client may have disconnected
        self._turns.give_back()
