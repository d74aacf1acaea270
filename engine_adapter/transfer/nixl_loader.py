"""Load NIXL: choose one of its variants, silence its logging, and collect the error classes of the same
variant.

NIXL is packaged as `nixl_cu12` and `nixl_cu13`, built for different CUDA versions. `nixl` is a wrapper that
imports torch to choose between them. Two variants in one process would load two copies of UCX. So a variant
that is already loaded is preferred.
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
    """NIXL is not installed or fails to load. The text states the remedy."""


@dataclass(frozen=True, slots=True)
class Nixl:
    """A loaded variant of NIXL."""

    variant: str
    agent: Any
    """Agent class."""
    config: Any
    """Agent configuration class."""
    errors: tuple[type[Exception], ...]
    """All errors that NIXL's calls raise."""
    gone: type[Exception]
    """The error for a peer that has disappeared."""
    unreadable: tuple[type[Exception], ...]
    """The errors for invalid metadata of a peer."""


def load_nixl() -> Nixl:
    """Load NIXL. NixlMissing when there is no variant. Takes up to a second, so do not call it on an event
    loop."""
    chosen = ("nixl", *_VARIANTS) if "nixl" in sys.modules else _VARIANTS
    reasons = []
    for variant in chosen:
        try:
            api = _quietly(f"{variant}._api")
        except ImportError as error:
            reasons.append(str(error))
            continue
        bindings = api.nixlBind
        errors = tuple(
            one for one in vars(bindings).values() if isinstance(one, type) and issubclass(one, Exception)
        )
        _log.info("nixl: the variant is %s", variant)
        unreadable = (bindings.nixlMismatchError, bindings.nixlInvalidParamError)
        return Nixl(
            variant,
            api.nixl_agent,
            api.nixl_agent_config,
            errors,
            bindings.nixlRemoteDisconnectError,
            unreadable,
        )
    raise NixlMissing(
        f"NIXL cannot be loaded ({'; '.join(reasons)}): install Roost with the extra `nixl`, or set"
        " transfer.backend to shared"
    )


def _quietly(module: str) -> ModuleType:
    """Import NIXL without its side effects: it logs to standard output, and it disables error reporting of
    `logging` for the whole process. A library should do neither."""
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
    """Create a unique agent name. Peers cache an agent's state under its name, so names must not be
    reused."""
    return f"{engine}-{rank}.{uuid.uuid4().hex[:8]}"
