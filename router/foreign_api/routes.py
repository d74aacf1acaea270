"""The routes of other servers that pass, and what each means for routing. Pure.

Chat and completions are not here: Roost serves these itself, too. A route that is neither here nor Roost's
own may change a server (`/sleep`, `/collective_rpc`, `/v1/load_lora_adapter`, ...): it passes only where the
configuration names it, for callers with the right.
"""

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple


class RouteKind(Enum):
    """How the server of a request is found."""

    INFERENCE = auto()
    """by model and load"""
    OBJECT = auto()
    """by the id of what an earlier answer made"""
    NAMED = auto()
    """by name, or there is only one: lists of objects, and administration"""


class ForeignRoute(NamedTuple):
    kind: RouteKind
    generates: bool = False
    """its answer has tokens to decode, and may be a stream"""
    creates: bool = False
    """its answer names an object that stays on its server"""
    repeatable: bool = True
    """nothing is left at a server that failed"""
    object_id: str = ""
    administers: bool = False


CHAT_ROUTE = ForeignRoute(RouteKind.INFERENCE, generates=True)
"""Of chat and completions."""
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
    | {path: ForeignRoute(RouteKind.INFERENCE, creates=True, repeatable=False) for path in ("/v1/files", "/v1/batches")}
)
_OBJECT = re.compile(rf"/v1/({'|'.join(_OBJECTS)})/(?P<id>[A-Za-z0-9_-]{{1,256}})(?P<part>/[a-z_]{{1,32}})?")
_OBJECT_METHODS = {"GET": (None, "/content", "/input_items"), "DELETE": (None,), "POST": ("/cancel",)}
_LISTS = ("/v1/files", "/v1/batches")


def route_of(method: str, path: str, administration: Iterable[str]) -> ForeignRoute | None:
    """How to pass on a request; None: it does not pass. administration: paths that the configuration lets
    pass."""
    if method == "POST" and path in _INFERENCE:
        return _INFERENCE[path]
    found = _OBJECT.fullmatch(path)
    if found is not None and found["part"] in _OBJECT_METHODS.get(method, ()):
        return ForeignRoute(RouteKind.OBJECT, repeatable=False, object_id=found["id"])
    if method == "GET" and path in _LISTS:
        return ForeignRoute(RouteKind.NAMED, administers=True)  # of all tenants' objects
    if method == "GET" and path == "/version":
        return ForeignRoute(RouteKind.NAMED)
    if path in administration:
        return ForeignRoute(RouteKind.NAMED, repeatable=False, administers=True)
    return None
