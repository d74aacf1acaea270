"""Pairs of a prefill and a decode worker on Dynamo's request plane: the request for a prefill worker, what it
answers, and the request for the worker that decodes. Pure.

A prefill worker gets the whole request with a limit of one token, which is not used: the decode worker
computes it again from the KV that it fetches.
"""

from typing import Any, NamedTuple

import msgspec

from fleet.popularity import PROMPT_EXPERTS, PromptExperts
from router.dynamo.wire.discovery import DynamoCard
from router.dynamo.wire.malformed import UNDECODABLE, Malformed
from router.dynamo.wire.requests import Json

_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_MAX_ROOM = 2**63 - 1
"""SGLang holds rooms in signed 64 bits."""


class KvHandle(NamedTuple):
    """Word of a prefill worker on the KV that it computes, for the worker that decodes."""

    params: Any
    """`disaggregated_params`: the workers' own, passed on unchanged"""
    prompt_details: Any = None
    """`prompt_tokens_details` of its usage"""
    experts: PromptExperts | None = None
    """None: the worker does not report what the prompt activated"""

    @property
    def bootstrap(self) -> Json | None:
        """The meeting place of both workers, who transfer the KV while the prefill still runs (SGLang); None:
        the KV is computed, and waits to be fetched.
        """
        stated = self.params if isinstance(self.params, dict) else {}
        found = {name: stated.get(name) for name in _BOOTSTRAP}
        if any(value is None for value in found.values()):
            return None
        return found | ({"handoff_id": stated["handoff_id"]} if "handoff_id" in stated else {})


def meeting(worker: DynamoCard, rank: int, number: int, handoff_id: bytes) -> Json | None:
    """Return the meeting place for one request, where a prefill worker's card names an address; None: it does
    not. rank: of the worker, from 0. number: random, below 2^63; handoff_id: a UUID,
    which the request plane carries as 16 bytes.
    """
    limits = worker.runtime_config
    place, ranks = limits.disaggregated_endpoint, limits.data_parallel_size
    if place is None or place.bootstrap_host is None or place.bootstrap_port is None:
        return None
    # the worker takes the rank from the room: SGLang's is the remainder by the number of ranks
    room = number % ((_MAX_ROOM - rank) // ranks + 1) * ranks + rank
    values = place.bootstrap_host, place.bootstrap_port, room
    return dict(zip(_BOOTSTRAP, values, strict=True)) | {"handoff_id": handoff_id}


def prefill_request(request: Json, worker_id: int, dp_rank: int | None, place: Json | None) -> Json:
    """Return the request for a prefill worker, given a `worker_request` for it. place: see `meeting`."""
    hints = dict(request["routing"]) | {"prefill_worker_id": worker_id}
    if dp_rank is not None:
        hints["prefill_dp_rank"] = dp_rank
    stop = dict(request.get("stop_conditions") or {}) | {"max_tokens": 1}
    if stop.get("min_tokens"):
        stop["min_tokens"] = 1
    body = request | {"routing": hints, "stop_conditions": stop}
    return body if place is None else body | {"bootstrap_info": place}


def read_handle(item: Any) -> KvHandle | None:
    """Read an item of a prefill worker's answer; None: it names no KV. Malformed if it is no item, or reports
    experts that cannot be read.
    """
    if not isinstance(item, dict):
        raise Malformed(f"a prefill worker sent {item!r:.100} instead of an object")
    params = item.get("disaggregated_params")
    if params is None:
        return None
    usage, data = item.get("completion_usage"), item.get("engine_data")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return KvHandle(params, details, _experts(data.get(PROMPT_EXPERTS)) if isinstance(data, dict) else None)


def _experts(stated: Any) -> PromptExperts | None:
    try:
        found = None if stated is None else msgspec.convert(stated, PromptExperts)
        if found is not None:
            found.counts.array()
    except UNDECODABLE as error:
        raise Malformed(f"experts of a prompt: {error}") from error
    return found


def decode_request(request: Json, handle: KvHandle, prefill_worker: int) -> Json:
    """Return the request for the worker that decodes, given a `worker_request` for it and what the prefill
    worker said.
    """
    body = request | {"routing": dict(request["routing"]) | {"prefill_worker_id": prefill_worker}}
    if handle.bootstrap is not None:
        return body | {"bootstrap_info": handle.bootstrap}
    result = {"disaggregated_params": handle.params, "prompt_tokens_details": handle.prompt_details}
    return body | {"prefill_result": result}
