"""Assumptions of what-if decisions: terms that do not count, and ranks that are gone. Pure."""

from collections.abc import Iterable
from urllib.parse import parse_qsl

from fleet.completions import ApiError
from fleet.text import listed
from router.fleet_state.target_table import RankKey, TargetTable
from router.scheduling.cost import TERMS
from router.scheduling.decision_record import Supposed

GONE = "gone, as assumed"
MAX_NAMES = 1024
_NAMED_RANKS = 16


def parsed_query(query: bytes) -> Supposed:
    """Parse the assumptions of a query string: without=TERM and gone=ENGINE/RANK (or gone=ENGINE), each any
    number of times.

    ApiError 400 for anything else.
    """
    try:
        pairs = (
            parse_qsl(
                query.decode("ascii"), keep_blank_values=True, strict_parsing=True, max_num_fields=MAX_NAMES
            )
            if query
            else []
        )
    except ValueError as error:
        raise ApiError(
            400, f"the query string cannot be read ({error}); {_USE}", code="invalid_value"
        ) from error
    for name, _ in pairs:
        if name not in ("without", "gone"):
            raise ApiError(
                400, f"unknown query parameter {name!r}; {_USE}", param=name, code="unknown_parameter"
            )
    return supposed(
        (value for name, value in pairs if name == "without"),
        (value for name, value in pairs if name == "gone"),
    )


_USE = "allowed here are ?without=TERM and ?gone=ENGINE/RANK, each any number of times"


def supposed(without: Iterable[str], gone: Iterable[str]) -> Supposed:
    """Validate names of terms and of ranks or engines; duplicates count once. ApiError 400 for an unknown
    term; ranks are looked up later.
    """
    terms, ranks = tuple(dict.fromkeys(without)), tuple(dict.fromkeys(gone))
    for term in terms:
        if term not in TERMS:
            raise ApiError(
                400,
                f"there is no term {term!r} that could be left out; terms: {', '.join(TERMS)}",
                param="without",
                code="invalid_value",
            )
    if len(ranks) > MAX_NAMES:
        raise ApiError(
            400,
            f"{len(ranks)} ranks are assumed to be gone, at most {MAX_NAMES} are allowed",
            param="gone",
            code="invalid_value",
        )
    return Supposed(without=terms, gone=ranks)


def gone_ranks(gone: tuple[str, ...], target_table: TargetTable) -> dict[RankKey, str]:
    """Return the ranks of these names, with the reason for their exclusion. ApiError 400 if no rank has such
    a name, or no other rank would be left.
    """
    found: dict[RankKey, str] = {}
    for name in gone:
        keys = [target.key for target in target_table.targets if name in (target.name, target.engine.engine)]
        if not keys:
            names = listed((target.name for target in target_table.targets), _NAMED_RANKS)
            raise ApiError(
                400,
                f"no rank or engine {name!r} serves the model {target_table.model!r}; ranks: {names}",
                param="gone",
                code="invalid_value",
            )
        found |= dict.fromkeys(keys, GONE)
    if found and len(found) == len(target_table.targets):
        raise ApiError(
            400,
            f"every rank that serves the model {target_table.model!r} is assumed to be gone: keep at least"
            " one",
            param="gone",
            code="invalid_value",
        )
    return found
