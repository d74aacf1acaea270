"""The OpenAPI document: every route of the router, those that FastAPI does not see included."""

from typing import Any

import msgspec

from router.access.api_keys import RIGHTS, ROUTE
from router.admission.queue_policy import TIMEOUT_HEADER
from router.api.openapi_routes import FORWARDED, JSON, PLAIN, STRING, Described, parameter
from router.api.routes import RELEASE_PATH, RESERVE_PATH, ROUTE_PATH
from router.openai_api.request_schema import CHAT_PATH, TEXT_PATH, ChatRequest, TextRequest
from router.scheduling.cost import TERMS
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.external_reservations import ReleaseRecord, ReleaseRequest, ReservedRecord

_REFERENCE = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": STRING,
                "type": STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""Body of every error: OpenAI's."""
_HOT = (ChatRequest, TextRequest, DecisionRecord, ReservedRecord, ReleaseRequest, ReleaseRecord)


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's document with all routes described; fields that schemas do not list pass through."""
    plain = [
        kind
        for one in PLAIN
        for kind in (one.answer, one.body)
        if isinstance(kind, type) and kind is not None
    ]
    kinds = list(dict.fromkeys((*_HOT, *plain)))
    found, forms = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schemas = dict(zip(kinds, found, strict=True))
    document["components"] = {
        "schemas": {**forms, "Error": _ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _keys()}},
    }
    document["paths"] = {}
    for one in (*PLAIN, *FORWARDED):
        document["paths"].setdefault(one.path, {})[one.method] = _operation(one, schemas)
    document["paths"] |= _hot_routes(*(schemas[kind] for kind in _HOT))
    return document


def _keys() -> str:
    rights = "; ".join(f"{name}: {about}" for name, about in RIGHTS.items())
    return f"Needed where the router has a keys file. Rights of a key: {rights}"


def _operation(one: Described, schemas: dict[type, dict[str, Any]]) -> dict[str, Any]:
    answer = schemas[one.answer] if isinstance(one.answer, type) else one.answer
    errors = dict(one.errors)
    if one.right is not None:
        errors |= {"401": "No valid API key", "403": f"The key lacks the right {one.right}"}
    operation: dict[str, Any] = {"summary": one.summary}
    if one.parameters:
        operation["parameters"] = list(one.parameters)
    if one.body is not None:
        operation["requestBody"] = _content(JSON, schemas[one.body]) | {"required": True}
    operation["responses"] = {"200": {"description": "OK"} | _content(one.content, answer)} | _errors(errors)
    return operation | _secured(one.right)


def _content(content: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {content: {"schema": schema}}}


def _errors(errors: dict[str, str]) -> dict[str, Any]:
    body = _content(JSON, {"$ref": _REFERENCE.format(name="Error")})
    return {status: {"description": about} | body for status, about in sorted(errors.items())}


def _secured(right: str | None) -> dict[str, Any]:
    """Return the fields that say which right a key needs."""
    return {} if right is None else {"security": [{"key": []}], "x-right": right}


def _hot_routes(
    chat: dict[str, Any],
    text: dict[str, Any],
    decision: dict[str, Any],
    held: dict[str, Any],
    release: dict[str, Any],
    released: dict[str, Any],
) -> dict[str, Any]:
    either = {"anyOf": [chat, text]}
    answer = (
        "OpenAI's answer, complete or as server-sent events; the decision's id is in the header"
        " x-roost-decision-id"
    )
    return {
        CHAT_PATH: _post("Chat completion", chat, answer, {}, _PRIORITY, _TIMEOUT, right="infer"),
        TEXT_PATH: _post("Completion", text, answer, {}, _PRIORITY, _TIMEOUT, right="infer"),
        ROUTE_PATH: _post(
            "Decide and explain without running", either, "The decision", decision, _WITHOUT, _GONE
        ),
        RESERVE_PATH: _post(
            "Decide, and hold the load for the program that forwards the request",
            either,
            "The decision and its target",
            held,
            _WAIT,
            _PRIORITY,
            _TIMEOUT,
        ),
        RELEASE_PATH: _post(
            "Report that a reserved request computed its prompt, or is over",
            release,
            "The outcome; unknown ids are no error",
            released,
        ),
    }


_WITHOUT = parameter(
    "without",
    "Terms to leave out of the cost, to see their effect",
    {"type": "array", "items": {"type": "string", "enum": list(TERMS)}},
)
_GONE = parameter(
    "gone",
    "Ranks (engine/rank) or engines to treat as absent",
    {"type": "array", "items": {"type": "string"}},
)
_WAIT = parameter(
    "wait", "Wait for capacity when every rank is saturated", {"type": "boolean", "default": False}
)
_PRIORITY = parameter(
    "x-priority",
    "Its class (by default high, normal or low), or an integer: 0 is the default class, lower more urgent",
    where="header",
)
_TIMEOUT = parameter(
    TIMEOUT_HEADER,
    "Refuse it when no rank has taken it after this many milliseconds",
    {"type": "integer", "minimum": 1},
    "header",
)


def _post(
    summary: str,
    body: dict[str, Any],
    answer: str,
    form: dict[str, Any],
    *query: dict[str, Any],
    right: str = ROUTE,
) -> dict[str, Any]:
    errors = {
        "400": "Bad request, with the field's name",
        "401": "No valid API key",
        "403": f"The key lacks the right {right}",
        "404": "Unknown model",
        "413": "Body too large",
        "429": (
            "Every rank and the queue are saturated (code saturated), or a more urgent request displaced it"
            " from the queue (shed)"
        ),
        "503": (
            "No rank had room in time (queue_timeout), no engine is alive (no_engine), or the router starts"
            " or stops (not_ready)"
        ),
    }
    return {
        "post": {
            "summary": summary,
            "parameters": list(query),
            "requestBody": {"required": True, **_content(JSON, body)},
            "responses": {"200": {"description": answer, **_content(JSON, form)}} | _errors(errors),
            **_secured(right),
        }
    }
