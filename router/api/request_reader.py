"""Reading of requests: for whom a body is, which servers take it, and what serving it needs."""

import re
import time

from fleet.blocks import salted_seed
from fleet.completions import ApiError, context_exceeded
from router.admission.queue_policy import TIMEOUT_HEADER, class_of
from router.bodies.reader import Decoded
from router.bodies.tasks import Kind as BodyKind
from router.bodies.tasks import PromptBounds
from router.fleet_state.target_table import TargetTable
from router.foreign_api.forwarded import ForeignPrompt
from router.foreign_api.headers import value_of
from router.foreign_api.lenient_fields import LenientRequest
from router.http.asgi_response import not_ready
from router.openai_api.completion_state import CompletionState
from router.openai_api.request_schema import (
    CHAT_PATH,
    DEFAULT_COMPLETION_TOKENS,
    TEXT_PATH,
    ChatRequest,
    Request,
    SamplingSettings,
    sampling,
)
from router.openai_api.unserved_fields import NO_FIELDS
from router.prefix_index.prompt import TextPrompt, TokenPrompt
from router.scheduling.routing_request import RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog

_TIMEOUT_MS = re.compile(r"[0-9]{1,10}")
_TRACED = "max_tokens", "temperature", "top_p", "stream"
"""Fields of a request that its span repeats."""


class RequestReader:
    """Reads bodies, and records on the request log what they say."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    @property
    def has_text_servers(self) -> bool:
        """True when there are servers that speak text, or may be."""
        service = self._service
        return service.view.serves_text or bool(service.config.backends or service.config.named_backends)

    async def routing_request(self, request_log: RequestLog, body: bytes) -> RoutingRequest:
        """Return the routing request of serving the first prompt of a body once. ApiError 400 for an invalid
        request, 404 for an unknown model, 503 when no engine is alive.
        """
        lenient = await self.for_text_servers(request_log, body)
        # Nothing is forwarded here, so no server would refuse an unknown name.
        known = lenient is not None and lenient.model in (None, request_log.model)
        served = self._service.scheduler.target_table(request_log.model) if known else None
        if lenient is not None and served is not None and served.dialect == "text":
            keys = request_log.keys(CHAT_PATH if lenient.is_chat else TEXT_PATH)
            read = await self.foreign_prompt(request_log, lenient, body, served, chat=lenient.is_chat)
            return RoutingRequest(
                request_log.model,
                read.prompt,
                0,
                self.expected(lenient.max_tokens),
                None,
                request_log.request_id,
                keys,
                owner=request_log.owner,
            )
        decoded = await self.decoded("either", request_log, body)
        request = decoded.request
        table = self._service.scheduler.target_table(request.model)
        keys = request_log.keys(CHAT_PATH if isinstance(request, ChatRequest) else TEXT_PATH)
        _, (state, *_) = await self.completion_states(request_log, decoded, table)
        request_log.prompt_tokens = len(state.prompt)
        return RoutingRequest(
            model=request.model,
            prompt=TokenPrompt(state.prompt, request_log.block_seed),
            context=len(state.prompt) + state.max_tokens,
            output=self.expected(state.max_tokens),
            tokenizer=table.tokenizer,
            request_id=request_log.request_id,
            keys=keys,
            owner=request_log.owner,
            passes_fields=bool(state.fields.binding),
        )

    async def for_text_servers(self, request_log: RequestLog, body: bytes) -> LenientRequest | None:
        """Parse the request as leniently as servers that speak text do, and record it on the request log.
        None: there are no such servers, or it names no model of theirs.
        """
        if not self.has_text_servers:
            return None
        fields = await self._service.bodies.read_passthrough(
            request_log.client, body, value_of(request_log.client_headers, b"content-type")
        )
        model = self._text_model(fields.model)
        if model is None:
            return None
        known = type(fields.priority) is int or fields.priority in self._service.config.classes
        request_log.session = request_log.session or fields.session
        request_log.tenant = request_log.tenant or fields.user
        self._note(request_log, model, fields, fields.priority if known else None)
        return fields

    def _text_model(self, named: str | None) -> str | None:
        """Return the model whose servers get a request. If all servers serve the same models, they also get
        unknown names, to answer them.
        """
        view = self._service.view
        if named is not None and (view.target_table(named).targets or named in view.models(live=False)):
            return named
        default = view.default_text_model()
        if named is None or default is None:
            return default
        live = sum(state.ranks for state in view.engines() if state.obstacle is None)
        return default if len(view.target_table(default).targets) == live else named

    async def foreign_prompt(
        self,
        request_log: RequestLog,
        fields: LenientRequest,
        body: bytes,
        table: TargetTable,
        *,
        chat: bool,
    ) -> ForeignPrompt:
        """Return the prompt of a request to servers that speak text. With their tokenizer it is known by its
        ids, and its blocks are those of their KV events.
        """
        tokenizer = self._service.tokenizer(table.tokenizer)
        if tokenizer is None or table.tokenizer is None:
            return self.text_prompt(request_log, fields)
        started, context = time.perf_counter(), table.largest_context
        found = await self._service.bodies.foreign_prompt(
            request_log.client, body, tokenizer, table.tokenizer, context, request_log.salt, chat=chat
        )
        self._service.metrics.tokenise.observe(time.perf_counter() - started)
        if found is None:
            return self.text_prompt(request_log, fields)
        request_log.prompt_tokens = len(found.ids)
        prompt = TokenPrompt(found.ids, salted_seed(request_log.salt, table.adapter))
        return ForeignPrompt(prompt, found.asks, found.fields)

    @staticmethod
    def text_prompt(request_log: RequestLog, fields: LenientRequest) -> ForeignPrompt:
        """Return the prompt of a request as far as its text tells."""
        text, size = fields.prompt, fields.prompt_bytes
        return ForeignPrompt(TextPrompt(text, request_log.model, request_log.block_seed, size))

    async def decoded(self, kind: BodyKind, request_log: RequestLog, body: bytes) -> Decoded:
        """Decode and validate a body for ranks that speak token ids, and record it on the request log."""
        decoded = await self._service.bodies.read(request_log.client, kind, body)
        request = decoded.request
        request_log.session = request_log.session or request.prompt_cache_key
        request_log.tenant = request_log.tenant or request.user or request.safety_identifier
        self._note(request_log, request.model, request, request.priority)
        return decoded

    async def completion_states(
        self, request_log: RequestLog, decoded: Decoded, table: TargetTable
    ) -> tuple[SamplingSettings, list[CompletionState]]:
        """Return the settings of a request, and one completion state per choice of each prompt; choice i
        samples with seed + i. ApiError 400 for values that the ranks do not serve.
        """
        request, limit = decoded.request, self._service.config.max_choices
        settings = sampling(request, limit, passes_fields=table.passes_fields)
        prompt_ids = await self._tokenise(request_log, decoded, settings, table)
        fields = NO_FIELDS
        if table.passes_fields:
            fields = await self._service.bodies.passed_fields(request_log.client, decoded)
        if len(prompt_ids) * settings.n > limit:
            raise ApiError(
                400,
                f"{len(prompt_ids)} prompts with n = {settings.n} are more than {limit} choices",
                param="prompt",
                code="invalid_value",
            )
        seed = self._service.draw_seed() if settings.seed is None else settings.seed
        limits = [_max_tokens(request, settings, len(ids), table.largest_context) for ids in prompt_ids]
        return settings, [
            CompletionState(
                at * settings.n + choice, ids, settings, limit, _wrapped(seed + choice), request.model, fields
            )
            for at, (ids, limit) in enumerate(zip(prompt_ids, limits, strict=True))
            for choice in range(settings.n)
        ]

    async def _tokenise(
        self, request_log: RequestLog, decoded: Decoded, settings: SamplingSettings, table: TargetTable
    ) -> list[list[int]]:
        """Return the token ids of each prompt."""
        tokenizer, service = self._service.tokenizer(table.tokenizer), self._service
        if tokenizer is None or table.tokenizer is None:
            raise not_ready("the model's tokenizer has not been loaded yet")
        started = time.perf_counter()
        room = PromptBounds(table.largest_context, max(1, service.config.max_choices // settings.n))
        found = await service.bodies.ids(
            request_log.client, decoded, tokenizer, table.tokenizer, room, request_log.salt
        )
        service.metrics.tokenise.observe(time.perf_counter() - started)
        return found

    def expected(self, max_tokens: int | None) -> int:
        """Return the expected number of output tokens."""
        limit = self._service.config.expected_output_tokens
        return limit if max_tokens is None else max(1, min(max_tokens, limit))

    def _note(
        self,
        request_log: RequestLog,
        model: str,
        request: Request | LenientRequest,
        priority: str | int | None,
    ) -> None:
        """Record a request on the request log. ApiError 400 for an invalid priority, deadline or salt."""
        request_log.model, request_log.stream = model, bool(request.stream)
        request_log.salt = self._service.credentials.cache_salt(request_log.caller.tenant, request.cache_salt)
        self._rank(request_log, priority)
        if request_log.trace is not None:
            request_log.trace.decoded(model, {name: getattr(request, name) for name in _TRACED})

    def _rank(self, request_log: RequestLog, priority: str | int | None) -> None:
        """Set the request's priority class and deadline. ApiError 400 for an invalid one."""
        config = self._service.config
        index = class_of(request_log.priority_header or priority, config.classes, config.default_class)
        request_log.urgency = max(index, request_log.caller.most_urgent(config.classes))
        request_log.priority = config.classes[request_log.urgency]
        if request_log.timeout_header is not None:
            if not _TIMEOUT_MS.fullmatch(request_log.timeout_header) or not int(request_log.timeout_header):
                message = (
                    f"{TIMEOUT_HEADER} must be a whole number of milliseconds above 0, not"
                    f" {request_log.timeout_header[:64]!r}"
                )
                raise ApiError(400, message, param=TIMEOUT_HEADER, code="invalid_value")
            request_log.give_up_at = request_log.started + int(request_log.timeout_header) / 1000.0


def _max_tokens(request: Request, settings: SamplingSettings, prompt_tokens: int, context: int) -> int:
    """Return the limit of emitted tokens. ApiError 400 context_length_exceeded when the request does not
    fit."""
    room, prompt = context - prompt_tokens, "messages" if isinstance(request, ChatRequest) else "prompt"
    if room < 1:
        raise context_exceeded(context, prompt_tokens, None, prompt=prompt, param=prompt)
    if settings.max_tokens is None:
        return room if isinstance(request, ChatRequest) else min(room, DEFAULT_COMPLETION_TOKENS)
    if settings.max_tokens > room:
        param = (
            "max_completion_tokens"
            if isinstance(request, ChatRequest) and request.max_completion_tokens is not None
            else "max_tokens"
        )
        raise context_exceeded(context, prompt_tokens, settings.max_tokens, prompt=prompt, param=param)
    return settings.max_tokens


def _wrapped(seed: int) -> int:
    """Wrap into 64 signed bits."""
    return (seed + 2**63) % 2**64 - 2**63
