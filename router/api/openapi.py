"""Hot routes in the OpenAPI document. They bypass FastAPI, so their description is added here."""

from typing import Any

import msgspec

from router.admission.queue_policy import TIMEOUT_HEADER
from router.api.routes import RELEASE_PATH, RESERVE_PATH, ROUTE_PATH
from router.openai_api.request_schema import CHAT_PATH, TEXT_PATH, ChatRequest, TextRequest
from router.scheduling.cost import TERMS
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.external_reservations import ReleaseRecord, ReleaseRequest, ReservedRecord

_REFERENCE = "#/components/schemas/{name}"


def with_hot_routes(document: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's document with the raw routes and their schemas; fields that the schemas do not list
    pass through.
    """
    kinds = [ChatRequest, TextRequest, DecisionRecord, ReservedRecord, ReleaseRequest, ReleaseRecord]
    (chat, text, decision, held, release, released), forms = msgspec.json.schema_components(
        kinds, ref_template=_REFERENCE
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(forms)
    either = {"anyOf": [chat, text]}
    answer = (
        "OpenAI's answer, complete or as server-sent events; the decision's id is in the header"
        " x-roost-decision-id"
    )
    document["paths"] |= {
        CHAT_PATH: _post("Chat completion", chat, answer, {}, _PRIORITY, _TIMEOUT),
        TEXT_PATH: _post("Completion", text, answer, {}, _PRIORITY, _TIMEOUT),
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
    return document


def _query(name: str, about: str, schema: dict[str, Any], where: str = "query") -> dict[str, Any]:
    return {"name": name, "in": where, "required": False, "description": about, "schema": schema}


_TEXT = {"type": "string"}
_WITHOUT = _query(
    "without",
    "Terms to leave out of the cost, to see their effect",
    {"type": "array", "items": {"type": "string", "enum": list(TERMS)}},
)
_GONE = _query(
    "gone",
    "Ranks (engine/rank) or engines to treat as absent",
    {"type": "array", "items": {"type": "string"}},
)
_WAIT = _query(
    "wait", "Wait for capacity when every rank is saturated", {"type": "boolean", "default": False}
)
_PRIORITY = _query(
    "x-priority",
    "Its class (by default high, normal or low), or an integer: 0 is the default class, lower more urgent",
    _TEXT,
    "header",
)
_TIMEOUT = _query(
    TIMEOUT_HEADER,
    "Refuse it when no rank has taken it after this many milliseconds",
    {"type": "integer", "minimum": 1},
    "header",
)


def _post(
    summary: str, body: dict[str, Any], answer: str, form: dict[str, Any], *query: dict[str, Any]
) -> dict[str, Any]:
    errors = {
        "400": "Bad request, with the field's name",
        "401": "No valid API key",
        "404": "Unknown model",
        "413": "Body too large",
    }
    errors |= {
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
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": (
                {"200": {"description": answer, "content": {"application/json": {"schema": form}}}}
                | {status: {"description": about} for status, about in errors.items()}
            ),
        }
    }
