"""Errors of requests that no rank may serve, with the reasons. Pure."""

from collections.abc import Mapping, Sequence

from fleet.completions import MAX_NAME, ApiError, shortened
from router.admission.queue_policy import Saturated
from router.fleet_state.target_table import RankKey, TargetTable
from router.health.circuit_breakers import Exclusions
from router.scheduling.routing_request import Attempt


def no_live_rank(target_table: TargetTable, known: Sequence[str]) -> ApiError:
    """Return the error for a model without a live rank. known: models whose engines have joined."""
    if not known:
        return ApiError(503, "no engine has joined yet", code="no_engine", retry_after=2.0)
    model = target_table.model
    if model not in known:
        message = (
            f"the model {shortened(model, MAX_NAME)!r} does not exist; models served here: {', '.join(known)}"
        )
        return ApiError(404, message, code="model_not_found", param="model")
    others = {out.reason for out in target_table.excluded if not out.reason.startswith("serves another")}
    return Saturated(
        503,
        f"no engine of model {model!r} is live at present ({'; '.join(sorted(others))})",
        code="no_engine",
        retry_after=2.0,
    )


def all_barred(model: str, barred: Mapping[RankKey, str]) -> ApiError:
    """Return the error of a request that no rank may serve, with the reasons."""
    reasons = "; ".join(sorted(set(barred.values())))
    return ApiError(
        503,
        f"no rank of model {model!r} may serve this request: {reasons}",
        code="no_engine",
        retry_after=2.0,
    )


def no_candidate(
    target_table: TargetTable,
    model: str,
    attempt: Attempt,
    exclusions: Exclusions,
    others: Mapping[RankKey, str],
) -> ApiError:
    """Return the error that explains why no rank may serve a request. others: ranks with other weights than a
    continued answer needs, with reasons.
    """
    if others:
        key, reason = next(iter(others.items()))
        message = (
            "the answer broke off and cannot be continued: no rank with its weights is left"
            f" ({target_table.targets[target_table.index[key]].name}: {reason})"
        )
        return ApiError(503, message, code="weights_changed", retry_after=1.0)
    if attempt.failures:
        message = (
            "every rank that serves this model failed this request, the last with"
            f" {attempt.failures[-1][1].value}"
        )
        kind = Saturated if attempt.awaits_engine else ApiError
        return kind(503, message, code="upstream_failed", retry_after=2.0)
    if len(exclusions.hard) == len(target_table.targets):
        message = (
            f"every rank that serves the model {model!r} is draining; undo it with: roost drain ENGINE --undo"
        )
        return ApiError(503, message, code="draining", retry_after=5.0)
    return ApiError(
        503, "no rank that serves this model can take this request now", code="no_engine", retry_after=2.0
    )
