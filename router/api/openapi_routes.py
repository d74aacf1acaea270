"""Descriptions of the router's plain routes, and of those that it forwards, for the OpenAPI document."""

from typing import Any, NamedTuple

from router.access.api_keys import ADMIN, INFER, METRICS, ROUTE
from router.api.backend_record import BackendStatus, DrainRequest
from router.api.event_routes import END, EVENT_KINDS, GAP, HEARTBEAT_SECONDS
from router.api.fleet_record import FleetRecord
from router.api.loop_record import LoopRecord, PauseRequest
from router.dashboard.feed import END as FEED_END
from router.dashboard.routes import TOPICS
from router.dashboard.views.decisions import DecisionList
from router.dashboard.views.experts import ExpertMaps
from router.foreign_api.routes import documented_routes
from router.scheduling.decision_record import DecisionRecord

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
HTML = "text/html"
OBJECT = {"type": "object"}
STRING = {"type": "string"}


class Described(NamedTuple):
    """One operation. right: that its key needs; None: none. answer: type or schema of a status 200."""

    method: str
    path: str
    summary: str
    right: str | None
    answer: type | dict[str, Any]
    content: str = JSON
    parameters: tuple[dict[str, Any], ...] = ()
    body: type | None = None
    errors: dict[str, str] = {}  # noqa: RUF012 never changed


def parameter(
    name: str, about: str, schema: dict[str, Any] = STRING, where: str = "query", *, required: bool = False
) -> dict[str, Any]:
    """Return the description of one parameter of a query, header or path."""
    return {"name": name, "in": where, "required": required, "description": about, "schema": schema}


def _path(name: str, about: str) -> dict[str, Any]:
    return parameter(name, about, where="path", required=True)


_EVENT_TEXT = f"""Events of the fleet, as server-sent events. Stored kinds have an id, their position in the
log, which is the same at every router: send the last one as Last-Event-ID (browsers do), and nothing is lost
or doubled. Telemetry (EngineHeartbeat, TrackerHeartbeat, KvMetrics, HomesPublished, PopularityShifted)
arrives only when asked for by kind, has no id and is not repeated. The event `{GAP}` reports events that this
reader misses, with their number if known; `{END}` is the last event of a stream that the router ends. A
comment follows {HEARTBEAT_SECONDS:g} s of silence. The data of an event is JSON: kind, engine, subject,
publisher_id, sequence, published_at (Unix seconds of the sender), message (its fields:
docs/asyncapi.yaml)."""

_PLANNER_ERRORS = {
    "409": "The planner refuses, with its reason",
    "503": "No planner (no_planner)",
    "504": "The planner did not answer in time, and may still apply the request (planner_silent)",
}

PLAIN = (
    Described(
        "get",
        "/v1/models",
        "List the models that a live engine serves, in OpenAI's form",
        INFER,
        {
            "type": "object",
            "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": OBJECT}},
        },
    ),
    Described(
        "get",
        "/v1/models/{name}",
        "Return one model",
        INFER,
        OBJECT,
        parameters=(_path("name", "Name of the model; may hold slashes"),),
        errors={"404": "Unknown model; the message names those that exist"},
    ),
    Described(
        "get",
        "/v1/decisions/{decision_id}",
        "Return a recent decision of any router about a request of the caller's tenant",
        ROUTE,
        DecisionRecord,
        parameters=(_path("decision_id", "The answer's header x-roost-decision-id"),),
        errors={"404": "Unknown, forgotten, or another tenant's"},
    ),
    Described(
        "get",
        "/v1/backends",
        "Return the static backends as this router process sees them",
        METRICS,
        {
            "type": "object",
            "properties": {
                "data": {"type": "array", "items": {"$ref": "#/components/schemas/BackendStatus"}}
            },
        },
    ),
    Described(
        "post",
        "/v1/backends/{name}/drain",
        "Stop sending new requests to a static backend, or resume",
        ADMIN,
        BackendStatus,
        parameters=(_path("name", "Name of the backend"),),
        body=DrainRequest,
        errors={"400": "Bad body", "404": "Unknown backend", "409": "It has not answered yet"},
    ),
    Described(
        "get",
        "/v1/loop",
        "Return the state of the automatic control loop, as the planner reports it",
        ADMIN,
        LoopRecord,
        errors=_PLANNER_ERRORS,
    ),
    Described(
        "post",
        "/v1/loop/pause",
        "Pause the automatic control loop until it is resumed, or resume it; running plans are completed",
        ADMIN,
        LoopRecord,
        body=PauseRequest,
        errors={"400": "Bad body", **_PLANNER_ERRORS},
    ),
    Described("get", "/v1/status", "Return the fleet as this router process sees it", METRICS, FleetRecord),
    Described(
        "get",
        "/v1/engines/{engine}/plan",
        "Return the plan that the planner would make for an engine now; nothing is moved",
        ADMIN,
        {"type": "object", "description": "migration.model.plan_record.PlanRecord"},
        parameters=(
            _path("engine", "Name of the engine"),
            parameter("policy", "Planning policy; by default the configured one"),
            parameter("budget_bytes", "Most bytes to copy", {"type": "integer", "minimum": 0}),
        ),
        errors={
            "400": "Bad budget",
            "409": "The planner's reason why it cannot plan (no_plan)",
            "503": "No planner (no_planner)",
        },
    ),
    Described(
        "get",
        "/v1/events",
        _EVENT_TEXT.replace("\n", " "),
        ADMIN,
        STRING,
        EVENTS,
        (
            parameter(
                "kind",
                "Kinds to read, repeated or separated by commas; by default all stored ones",
                {"type": "array", "items": {"type": "string", "enum": list(EVENT_KINDS)}},
            ),
            parameter("engine", "Only events about this engine"),
            parameter("since", "First the stored events of the last e.g. 90s, 15m, 1h or 2d"),
            parameter("Last-Event-ID", "First the stored events behind this id", where="header"),
        ),
        errors={
            "400": "Unknown kind, bad time or id",
            "429": "Too many readers at this router",
            "503": "No bus, or the router stops",
        },
    ),
    Described("get", "/health", "Report that the process is alive", None, OBJECT),
    Described(
        "get",
        "/ready",
        "Report whether requests can be served; with the right `metrics` also what is missing",
        None,
        OBJECT,
        errors={"503": "Not ready"},
    ),
    Described("get", "/metrics", "Return the metrics as Prometheus text", METRICS, STRING, TEXT),
    Described(
        "get", "/dashboard", "Return the page of the dashboard, which holds nothing", None, STRING, HTML
    ),
    Described(
        "get",
        "/dashboard/static/{name}",
        "Return a file of that page",
        None,
        STRING,
        TEXT,
        (_path("name", "Name of the file; may hold slashes"),),
        errors={"404": "No such file"},
    ),
    Described(
        "get",
        "/dashboard/feed",
        "Views of the dashboard as server-sent events: the name of an event is its topic, its data the whole"
        f" view as JSON, sent whenever it changes. `{FEED_END}` is the last event of a feed that the router"
        " ends. Their form follows the page and may change with any version",
        ADMIN,
        STRING,
        EVENTS,
        (parameter("topics", f"Topics, separated by commas: {', '.join(TOPICS)}", required=True),),
        errors={"400": "Unknown topic", "429": "Too many pages at this router"},
    ),
    Described(
        "get",
        "/dashboard/decisions",
        "Return the newest decisions of this router process, as the dashboard lists them",
        ADMIN,
        DecisionList,
        parameters=(
            parameter("tenant", "Only this tenant's"),
            parameter("model", "Only for this model"),
            parameter("engine", "Only those that chose this engine"),
        ),
    ),
    Described(
        "get",
        "/dashboard/decisions/{decision_id}",
        "Return a recent decision of any router and tenant",
        ADMIN,
        DecisionRecord,
        parameters=(_path("decision_id", "The answer's header x-roost-decision-id"),),
        errors={"404": "Unknown or forgotten"},
    ),
    Described(
        "get",
        "/dashboard/experts/{engine}",
        "Return the maps of an engine: demand, replicas and expected load, by layer, expert and rank",
        ADMIN,
        ExpertMaps,
        parameters=(_path("engine", "Name of the engine"),),
        errors={"404": "No such engine reports experts"},
    ),
)

FORWARDED = tuple(
    Described(
        method.lower(),
        path,
        "Forwarded unchanged to a server that Roost does not run, if one serves it",
        ADMIN if route.administers else INFER,
        {},
        parameters=(_path("object_id", "Id from an earlier answer"),) if route.object_id else (),
        errors={"404": "No server for this model or object", "503": "No server is available"},
    )
    for method, path, route in documented_routes()
)
