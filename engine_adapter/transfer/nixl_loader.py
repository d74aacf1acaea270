"""The one door to NIXL: which of its variants is taken, quietly, and with the error classes of that same variant.

NIXL comes as `nixl_cu12` and `nixl_cu13`, which differ in the CUDA that they are built for; `nixl` is a front that imports torch to choose one of them.
Two variants in one process would bring two copies of UCX, so one that is loaded already is taken before all others.
"""

import importlib
import logging
import sys
import uuid
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_VARIANTS = ("nixl_cu12", "nixl_cu13", "nixl")
_log = logging.getLogger(__name__)


class NixlMissing(Exception):
    """NIXL is not installed, or does not load; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Nixl:
    """A variant that is loaded."""

    variant: str
    agent: Any
    """class"""
    config: Any
    """class"""
    errors: tuple[type[Exception], ...]
    """all that its calls raise by themselves"""
    gone: type[Exception]
    """the one of them that says that a peer is not there any more"""
    unreadable: tuple[type[Exception], ...]
    """those of them that say that what describes a peer is nonsense"""


def load_nixl() -> Nixl:
    """NixlMissing when there is none. Takes up to a second and should not be done on an event loop."""
    chosen = ("nixl", *_VARIANTS) if "nixl" in sys.modules else _VARIANTS
    reasons = []
    for variant in chosen:
        try:
            api = _quietly(f"{variant}._api")
        except ImportError as error:
            reasons.append(str(error))
            continue
        bindings = api.nixlBind
        errors = tuple(one for one in vars(bindings).values() if isinstance(one, type) and issubclass(one, Exception))
        _log.info("nixl: the variant is %s", variant)
        unreadable = (bindings.nixlMismatchError, bindings.nixlInvalidParamError)
        return Nixl(variant, api.nixl_agent, api.nixl_agent_config, errors, bindings.nixlRemoteDisconnectError, unreadable)
    raise NixlMissing(f"NIXL cannot be loaded ({'; '.join(reasons)}): install Roost with the extra `nixl`, or set the transfer's way to shared")


def _quietly(module: str) -> ModuleType:
    """NIXL writes its log to standard output, and tells all of `logging` to keep its own errors to itself: neither is for a library to decide."""
    raises = logging.raiseExceptions
    try:
        loaded = importlib.import_module(module)
    finally:
        logging.raiseExceptions = raises
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
    return loaded


def agent_name(engine: str, rank: int) -> str:
    """A name that no agent had before: peers keep what they know of one under its name."""
    return f"{engine}-{rank}.{uuid.uuid4().hex[:8]}"
