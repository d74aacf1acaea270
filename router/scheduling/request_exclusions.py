"""Ranks that a request itself excludes: they lack what it refers to, or what it needs. Pure."""

from fleet.completions import ApiError
from router.fleet_state.target_table import TargetTable
from router.health.circuit_breakers import Exclusions
from router.scheduling.refusals import all_barred
from router.scheduling.routing_request import RoutingRequest
from router.scheduling.what_if import gone_ranks

_ELSEWHERE = "what this request refers to is on another server"
NO_IDS = "it takes no token ids, which the rest of this answer needs"
READS_ONLY = "it serves only the fields that Roost reads, but the request has others"


def beside_health(exclusions: Exclusions, target_table: TargetTable, need: RoutingRequest) -> Exclusions:
    """Add the ranks that a request itself excludes. ApiError 503 if that leaves none."""
    if need.supposed.gone:
        exclusions = exclusions.beside(gone_ranks(need.supposed.gone, target_table))
    if need.only is not None:
        if need.only not in target_table.index:
            raise ApiError(
                503,
                "the server that stores the objects of this request does not answer at present",
                code="no_engine",
                retry_after=2.0,
            )
        exclusions = exclusions.beside(
            {target.key: _ELSEWHERE for target in target_table.targets if target.key != need.only}
        )
    if need.takes_ids:
        speechless = [
            target.key for target in target_table.targets if not target.engine.capabilities.returns_ids
        ]
        exclusions = exclusions.beside(dict.fromkeys(speechless, NO_IDS))
    if need.passes_fields:
        plain = [
            target.key for target in target_table.targets if not target.engine.capabilities.passes_fields
        ]
        exclusions = exclusions.beside(dict.fromkeys(plain, READS_ONLY))
    barred = None if need.barred is None else need.barred(target_table)
    if barred:
        if len(barred) == len(target_table.targets):
            raise all_barred(need.model, barred)
        exclusions = exclusions.beside(barred)
    return exclusions
