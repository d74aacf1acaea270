"""Dynamo's workers as engines of the fleet, from discovery records. Pure.

A worker is an instance that serves an endpoint and has a model card for it. Each of its data-parallel ranks
is a target. `rank` counts the ranks of an engine from 0; Dynamo's `dp_rank` counts from the worker's first
rank.

A worker is an engine of its own, unless its card says that it serves ranks of an engine of Roost's fleet.
Then its targets are the ranks of that engine, with its placement, its load and its cached blocks.

Prefill workers of a model are engines of a model of their own (`prefill_model`), so that its requests never
reach them, and their own queue, prices and health are those of any model.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import xxhash

from fleet.experts import ModelShape
from fleet.facts.engines import Capabilities, EngineJoined
from router.dynamo.wire.discovery import (
    KV_EVENTS,
    KV_METRICS,
    DynamoCard,
    EndpointName,
    EventChannel,
    EventSource,
    ModelRecord,
    Record,
    ServedEndpoint,
)
from router.fleet_state.target_table import RankKey

_MAX_BATCH_TOKENS = 8192
"""Tokens of a step where the card states none: vLLM's default on large GPUs."""
_MAX_CONTEXT = 2**20
"""Context where the card states none."""
_MAX_NAME = 40
_PREFILL_MODEL = " (prefill)"


class RoutedWorker(NamedTuple):
    """A worker that takes requests with token ids."""

    endpoint: EndpointName
    instance_id: int
    card: DynamoCard
    joined: EngineJoined
    """the engine whose ranks it serves"""
    first_rank: int
    """dp_rank of the first rank that it serves"""
    offset: int = 0
    """number of that rank in the engine"""

    @property
    def prefills(self) -> bool:
        """True if it only computes prompts, for decode workers."""
        return _is_prefill(self.card)

    @property
    def decodes(self) -> bool:
        """True if it expects prompts that a prefill worker has computed."""
        return self.card.worker_type == "decode"

    @property
    def ranks(self) -> int:
        """Number of ranks that it serves."""
        return self.card.runtime_config.data_parallel_size

    @property
    def in_fleet(self) -> bool:
        """True if its ranks are those of an engine of Roost's fleet."""
        return self.joined.worker_id != self.instance_id

    @property
    def keys(self) -> tuple[RankKey, ...]:
        """Targets that it serves."""
        return tuple((self.joined.worker_id, self.offset + rank) for rank in range(self.ranks))

    def dp_rank(self, rank: int) -> int | None:
        """Return the dp_rank to send for a rank of the engine; None where there is no choice."""
        return self.first_rank + rank - self.offset if self.ranks > 1 or self.first_rank else None

    def pinned(self, dp_rank: int | None) -> frozenset[RankKey]:
        """Return the targets that a request with this dp_rank may get; None: it names none."""
        at = None if dp_rank is None else dp_rank - self.first_rank
        return frozenset(self.keys if at is None or not 0 <= at < self.ranks else (self.keys[at],))

    def of_fleet(self, joined: EngineJoined) -> "RoutedWorker":
        """Return the worker as a way to ranks of an engine of Roost's fleet, which number its ranks as Dynamo
        does. The worker itself if its card names another engine, or does not fit it.
        """
        named = self.card.runtime_config.fleet_engine
        fits = (
            named == (joined.engine, joined.worker_id)
            and joined.model == self.joined.model
            and joined.block_size == self.joined.block_size
            and self.first_rank + self.ranks <= len(joined.urls)
        )
        return self._replace(joined=joined, offset=self.first_rank) if fits else self


class Roles(NamedTuple):
    """Roles that some worker of a model has."""

    prefill: bool = False
    decode: bool = False


def roles_of(workers: Iterable[RoutedWorker]) -> dict[str, Roles]:
    """Return the roles of the workers of each model."""
    found: dict[str, Roles] = {}
    for worker in workers:
        known = found.get(worker.card.display_name, Roles())
        both = Roles(known.prefill or worker.prefills, known.decode or worker.decodes)
        found[worker.card.display_name] = both
    return found


class Workers(NamedTuple):
    """Content of discovery: workers by instance id, channels by publisher, and reasons why workers cannot be
    used.
    """

    serving: Mapping[int, RoutedWorker]
    channels: Mapping[int, EventChannel]
    unusable: Mapping[int, str]


def workers_of(
    records: Iterable[Record], namespace: str, own: EndpointName, shape: ModelShape | None = None
) -> Workers:
    """Return the workers of a namespace, without the router's own endpoint.

    An instance without a model card, or of which only the card is left, is no worker. shape: of the model's
    MoE layers; None: unknown.
    """
    served: set[tuple[EndpointName, int]] = set()
    cards: dict[tuple[EndpointName, int], DynamoCard] = {}
    channels: dict[int, EventChannel] = {}
    indexed: set[int] = set()
    for record in records:
        match record:
            case ServedEndpoint():
                served.add((record.name, record.instance_id))
            case ModelRecord() if record.namespace == namespace and record.name != own:
                cards[record.name, record.instance_id] = record.card_json
            case EventChannel() if _concerns(record, namespace):
                channels[record.instance_id] = record
            case EventSource() if record.topic == KV_EVENTS:
                indexed.add(record.metadata.worker.worker_id)
            case _:
                pass
    serving: dict[int, RoutedWorker] = {}
    unusable: dict[int, str] = {}
    for (endpoint, instance), card in cards.items():
        if (endpoint, instance) in served:
            reason = unusable_because(card)
            if reason is None:
                serving[instance] = _worker(endpoint, instance, card, shape, has_index=instance in indexed)
            else:
                unusable[instance] = f"{endpoint.path}/{instance:x}: {reason}"
    return Workers(serving, channels, unusable)


def _concerns(channel: EventChannel, namespace: str) -> bool:
    endpoint = channel.scope.endpoint
    return (
        endpoint is not None and endpoint.namespace == namespace and channel.topic in (KV_EVENTS, KV_METRICS)
    )


def unusable_because(card: DynamoCard) -> str | None:
    """Return the reason why requests cannot be routed to a worker; None: they can."""
    if card.model_input != "Tokens":
        return f"it takes {card.model_input.lower()}, and this router sends token ids"
    if card.worker_type not in (None, "aggregated", "prefill", "decode"):
        return f"it is a {card.worker_type} worker; this router knows aggregated, prefill and decode workers"
    return None


def prefill_model(model: str) -> str:
    """Return the name under which the prefill workers of a model are engines."""
    return model + _PREFILL_MODEL


def _is_prefill(card: DynamoCard) -> bool:
    """True for a prefill worker. Older ones say so by the type of their model."""
    return card.worker_type == "prefill" or (card.worker_type is None and "prefill" in card.surfaces)


def _worker(
    endpoint: EndpointName, instance: int, card: DynamoCard, shape: ModelShape | None, *, has_index: bool
) -> RoutedWorker:
    limits = card.runtime_config
    publishes = limits.kv_event_publishing_enabled
    joined = EngineJoined(
        engine=engine_name(endpoint, instance),
        worker_id=instance,
        engine_kind="dynamo",
        model=prefill_model(card.display_name) if _is_prefill(card) else card.display_name,
        node=endpoint.component,
        urls=tuple(
            f"dynamo://{endpoint.path}/{instance:x}/{limits.data_parallel_start_rank + rank}"
            for rank in range(limits.data_parallel_size)
        ),
        block_size=card.kv_cache_block_size,
        kv_blocks=limits.total_kv_blocks or 0,
        max_context=card.context_length or _MAX_CONTEXT,
        max_batch_tokens=limits.max_num_batched_tokens or _MAX_BATCH_TOKENS,
        tokenizer=tokenizer_digest(card),
        shape=shape,
        capabilities=Capabilities(
            kv_events=has_index if publishes is None else publishes,
            load=True,
            experts=False,
            token_ids=True,
            passes_fields=True,
            isolates_tenants=True,
        ),
    )
    return RoutedWorker(endpoint, instance, card, joined, limits.data_parallel_start_rank)


def engine_name(endpoint: EndpointName, instance: int) -> str:
    """Return the name of a worker in records of decisions, unique by its instance id."""
    readable = "".join(
        one if one.isascii() and (one.isalnum() or one in "-_") else "-" for one in endpoint.component
    )
    return f"{readable[:_MAX_NAME]}-{instance:016x}"


def tokenizer_digest(card: DynamoCard) -> str:
    """Return an identity of the tokenizer that a card names: workers with different ones are not mixed."""
    return (
        f"dynamo-{xxhash.xxh3_128_hexdigest(msgspec.json.encode(_checksums(card.tokenizer), order='sorted'))}"
    )


def _checksums(tokenizer: object) -> object:
    """Return the checksums in a card's description of its tokenizer, or all of it if there is none. The paths
    may differ between machines.
    """
    if isinstance(tokenizer, dict):
        if "checksum" in tokenizer:
            return tokenizer["checksum"]
        return {name: _checksums(value) for name, value in tokenizer.items()}
    return tokenizer
