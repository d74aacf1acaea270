"""Targets that must not serve a request of Dynamo, by the wishes of its client or of routers before this one.
Pure.
"""

from collections.abc import Mapping

from router.dynamo.wire.requests import RoutingWishes
from router.dynamo.workers import RoutedWorker
from router.fleet_state.target_table import RankKey, TargetTable

_NOT_NAMED = "the request names another worker"
EXPECTS_KV = "it expects the KV of a prefill worker"
_TAKES_NO_KV = "it takes no KV of a prefill worker"
_NOT_ALLOWED = "it is not among the workers that the request allows (allowed_worker_ids)"


def barred(
    table: TargetTable,
    serving: Mapping[RankKey, RoutedWorker],
    wishes: RoutingWishes,
    pinned: RoutedWorker | None,
    elsewhere: Mapping[RankKey, str],
) -> Mapping[RankKey, str]:
    """Return the targets of a table that must not serve a request, with reasons.

    serving: the worker of each target. pinned: the worker that the request names; None: none. elsewhere:
    targets without a worker, with the reason.
    """
    needed = wishes.required_taints
    if pinned is None and wishes.allowed_worker_ids is None and not needed:
        return elsewhere
    named = None if pinned is None else pinned.pinned(wishes.dp_rank)
    found = dict(elsewhere)
    for target in table.targets:
        worker = serving.get(target.key)
        if worker is not None:
            reason = _reason(target.key, worker, wishes, named, needed)
            if reason is not None:
                found[target.key] = reason
    return found


def _reason(
    key: RankKey,
    worker: RoutedWorker,
    wishes: RoutingWishes,
    named: frozenset[RankKey] | None,
    needed: frozenset[str],
) -> str | None:
    if named is not None and key not in named:
        return _NOT_NAMED
    if wishes.allowed_worker_ids is not None and worker.instance_id not in wishes.allowed_worker_ids:
        return _NOT_ALLOWED
    lacking = needed - worker.card.runtime_config.taints
    return f"it has not the required taints {', '.join(sorted(lacking))}" if lacking else None


def unpaired(
    table: TargetTable, serving: Mapping[RankKey, RoutedWorker], *, handed_over: bool
) -> dict[RankKey, str]:
    """Return the targets that do not fit what was done about the prompt, with reasons.

    handed_over: a prefill worker has computed it. Without its KV, decode workers are the last resort: not
    each can compute prompts.
    """
    decode = {target.key: _decodes(serving.get(target.key)) for target in table.targets}
    if all(decode.values()) or not any(decode.values()):
        return {}
    reason = _TAKES_NO_KV if handed_over else EXPECTS_KV
    return {key: reason for key, decodes in decode.items() if decodes is not handed_over}


def _decodes(worker: RoutedWorker | None) -> bool:
    return worker is not None and worker.decodes
