"""Forwarded routes of other servers, and their meaning for routing. Pure.

Chat and completions are missing here, since Roost also serves these itself. A route that is neither here nor
Roost's own may administer a server (`/sleep`, `/collective_rpc`, `/v1/load_lora_adapter`, ...). It is
forwarded only if the configuration lists it, and only for callers with the right.
"""

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple


class RouteKind(Enum):
    """Way to find the server of a request."""

    INFERENCE = auto()
    """by model and load"""
    OBJECT = auto()
    """by the id of an object that an earlier answer created"""
    NAMED = auto()
    """by name, or the only server there is: lists of objects, and administration"""


class ForeignRoute(NamedTuple):
    kind: RouteKind
    generates: bool = False
    """the answer has tokens to decode, and may be a stream"""
    creates: bool = False
    """the answer names an object that stays on its server"""
    repeatable: bool = True
    """a server that failed keeps no trace of the request"""
    object_id: str = ""
    administers: bool = False


CHAT_ROUTE = ForeignRoute(RouteKind.INFERENCE, generates=True)
"""Route of chat and completions."""
_GENERATING = (
    "/v1/responses",
    "/v1/messages",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/generate",
    "/inference/v1/generate",
)
_OTHER_INFERENCE = """
/v1/messages/count_tokens /tokenize /detokenize /v1/chat/completions/render /v1/completions/render
/v1/embeddings /pooling /classify /v1/classify /score /v1/score /rerank /v1/rerank /v2/rerank /v1/moderations
/v1/audio/speech /v1/images/generations /v1/images/edits /v1/images/variations
""".split()
_OBJECTS = ("responses", "files", "batches")
_INFERENCE = (
    dict.fromkeys(_OTHER_INFERENCE, ForeignRoute(RouteKind.INFERENCE))
    | dict.fromkeys(_GENERATING, ForeignRoute(RouteKind.INFERENCE, generates=True))
    | {"/v1/responses": ForeignRoute(RouteKind.INFERENCE, generates=True, creates=True)}
    | {
        path: ForeignRoute(RouteKind.INFERENCE, creates=True, repeatable=False)
        for path in ("/v1/files", "/v1/batches")
    }
)
_OBJECT = re.compile(rf"/v1/({'|'.join(_OBJECTS)})/(?P<id>[A-Za-z0-9_-]{{1,256}})(?P<part>/[a-z_]{{1,32}})?")
_OBJECT_METHODS = {"GET": (None, "/content", "/input_items"), "DELETE": (None,), "POST": ("/cancel",)}
_LISTS = ("/v1/files", "/v1/batches")


def route_of(method: str, path: str, administration: Iterable[str]) -> ForeignRoute | None:
    """Return the route for a request, or None if it is not forwarded. administration: paths that the
    configuration allows.
    """
    if method == "POST" and path in _INFERENCE:
        return _INFERENCE[path]
    found = _OBJECT.fullmatch(path)
    if found is not None and found["part"] in _OBJECT_METHODS.get(method, ()):
        return ForeignRoute(RouteKind.OBJECT, repeatable=False, object_id=found["id"])
    if method == "GET" and path in _LISTS:
        return ForeignRoute(RouteKind.NAMED, administers=True)  # lists the objects of all tenants
    if method == "GET" and path == "/version":
        return ForeignRoute(RouteKind.NAMED)
    if path in administration:
        return ForeignRoute(RouteKind.NAMED, repeatable=False, administers=True)
    return None


def documented_routes() -> list[tuple[str, str, ForeignRoute]]:
    """Return the method, path and route of everything that is forwarded without being configured; an object's
    id is `{object_id}`.
    """
    by_id = ForeignRoute(RouteKind.OBJECT, object_id="{object_id}")
    found = [("POST", path, route) for path, route in _INFERENCE.items()]
    found += [
        (method, f"/v1/{name}/{{object_id}}{part or ''}", by_id)
        for name in _OBJECTS
        for method, parts in _OBJECT_METHODS.items()
        for part in parts
    ]
    for path in (*_LISTS, "/version"):
        route = route_of("GET", path, ())
        assert route is not None
        found.append(("GET", path, route))
    return found
