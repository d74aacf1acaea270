"""Input of a decision: what a request needs of a rank, and the attempts made before. Pure."""

from collections.abc import Callable, Mapping

import msgspec

from router.fleet_state.target_table import RankKey, TargetTable
from router.health.attempt_failures import AttemptFailure, BegunAnswer
from router.prediction.predictor import NO_KEYS, PredictionKeys
from router.prefix_index.prompt import Prompt
from router.scheduling.decision import NOTHING, UNKNOWN_OWNER, Owner, RemotePrefill
from router.scheduling.decision_record import Supposed


class RoutingRequest(msgspec.Struct, frozen=True):
    """Input of a decision. `context`: tokens the rank must have room for; `output`: expected tokens.

    `tokenizer`: digest of the tokenizer of the ids to be sent; None: text is sent. `keys`: identity of
    the sender. `supposed`: assumptions of a what-if request. `owner`: the tenant, whose salt is in the
    prompt's hashes. external: another data plane will send the request.
    """

    model: str
    prompt: Prompt
    context: int
    output: int
    tokenizer: str | None
    request_id: str = ""
    keys: PredictionKeys = NO_KEYS
    supposed: Supposed = NOTHING
    owner: Owner = UNKNOWN_OWNER
    begun: BegunAnswer | None = None
    """weights and rank behind the first tokens of a continued answer; None: a new answer"""
    external: bool = False
    only: RankKey | None = None
    """the only rank that can serve it, because the objects it refers to are stored there"""
    takes_ids: bool = False
    """its prompt is sent as ids to servers that otherwise get text (`Capabilities.returns_ids`)"""
    passes_fields: bool = False
    """it has fields that are served only by engines that declare so (`Capabilities.passes_fields`)"""
    barred: Callable[[TargetTable], Mapping[RankKey, str]] | None = None
    """further targets of a table that must not serve it, with reasons; None: there are none"""
    prefill: RemotePrefill | None = None
    """its prompt was sent to a prefill worker before; None: it was not"""
    trace_id: str = ""
    """trace that it belongs to, 32 hexadecimal digits; "": none is known"""


class Attempt(msgspec.Struct, frozen=True):
    """Number of this attempt of a request, and the outcome of the earlier ones."""

    number: int = 1
    replaces: str | None = None
    failures: tuple[tuple[RankKey, AttemptFailure], ...] = ()
    waits: bool = False
    """True if it may wait for the engine that replaces one which died"""

    @property
    def awaits_engine(self) -> bool:
        """True when ranks that failed may have died. Their connections break a moment before the engine is
        known to be gone, and it returns as a new one.
        """
        return self.waits and any(how.lost_connection for _, how in self.failures)


FIRST_TRY = Attempt()
