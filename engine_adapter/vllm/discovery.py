"""Find out what a vLLM deployment is: its model, its data-parallel ranks, and the sources of their KV
events."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine_adapter.batching.tokenizer_archive import archived
from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.client import ModelCard
from engine_adapter.foreign.kv_source import KvSource, shifted
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.metrics_text import MetricsReading
from engine_adapter.vllm.server import VllmServer
from fleet.facts.engines import ServedModel

_ARCHIVED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_UNKNOWN_CONTEXT = 131_072
log = logging.getLogger(__name__)


class FoundTarget(NamedTuple):
    """One data-parallel rank of a deployment, which the router chooses as one target."""

    server: VllmServer
    rank: int
    """Number by which the server knows it."""
    kv_blocks: int
    kv: KvSource | None
    """Source of its KV events, at an address that can be connected to. None: it publishes none."""


class Deployment(NamedTuple):
    """A vLLM deployment, as found at one moment."""

    version: str
    started: float | None
    """Start of the first server, by its clock."""
    model: str
    models: tuple[ServedModel, ...]
    max_context: int
    block_size: int
    targets: tuple[FoundTarget, ...]
    tokenizer: bytes | None
    """Zip archive."""

    @property
    def shares_url(self) -> bool:
        """True if the targets are ranks of one server, named by a header."""
        return len(self.targets) > 1 and len({target.server.base for target in self.targets}) == 1


async def discover(config: VllmConfig, servers: Sequence[VllmServer]) -> Deployment:
    """Ask the servers. EngineFailed when one does not answer, or they do not form one deployment."""
    metrics = await asyncio.gather(*(server.metrics() for server in servers))
    cards = await asyncio.gather(*(server.models() for server in servers))
    found = [
        target
        for server, reading in zip(servers, metrics, strict=True)
        for target in await _targets(config, server, reading, alone=len(servers) == 1)
    ]
    first = metrics[0]
    chosen = _chosen(cards, config.model, servers[0].base)
    context = chosen.max_model_len or _UNKNOWN_CONTEXT
    return Deployment(
        version=await servers[0].version(),
        started=first.started,
        model=chosen.id,
        models=tuple(
            ServedModel(
                name=card.id, max_context=card.max_model_len or context, adapter=card.parent is not None
            )
            for card in cards[0]
        ),
        max_context=context,
        block_size=_block_size(servers, metrics),
        targets=tuple(found),
        tokenizer=_tokenizer(config, chosen.root),
    )


async def _targets(
    config: VllmConfig, server: VllmServer, metrics: MetricsReading, *, alone: bool
) -> list[FoundTarget]:
    """Return the targets of one server. alone: all ranks are behind this server, else it is one rank."""
    ranks = metrics.ranks
    if not ranks:
        raise EngineFailed(
            f"{server.base}/metrics names no rank (vllm:num_requests_running); is this a vLLM server, started"
            " without --disable-log-stats?"
        )
    if not alone and len(ranks) > 1:
        raise EngineFailed(
            f"{server.base} serves {len(ranks)} ranks; give its URL alone, or one URL for each rank"
        )
    sources = _configured(config, ranks) if config.kv_endpoint else await server.kv_sources()
    return [
        FoundTarget(server, rank, metrics.kv_blocks(rank), _reachable(sources.get(rank), server.base))
        for rank in ranks
    ]


def _configured(config: VllmConfig, ranks: Sequence[int]) -> dict[int, KvSource]:
    return {
        rank: KvSource(
            endpoint=shifted(config.kv_endpoint or "", rank),
            replay_endpoint=config.kv_replay_endpoint and shifted(config.kv_replay_endpoint, rank),
        )
        for rank in ranks
    }


def _reachable(source: KvSource | None, base: str) -> KvSource | None:
    return None if source is None else source.reachable_from(base)


def _chosen(cards: Sequence[tuple[ModelCard, ...]], name: str | None, base: str) -> ModelCard:
    listed = cards[0]
    for others in cards[1:]:
        if {card.id for card in others} != {card.id for card in listed}:
            raise EngineFailed(
                "the URLs do not serve the same models, so they are not the ranks of one deployment:"
                f" {_names(listed)} and {_names(others)}"
            )
    if not listed:
        raise EngineFailed(f"{base}/v1/models lists no model")
    for card in listed:
        if card.parent is None and name in (None, card.id):
            return card
    raise EngineFailed(f"{base} does not serve {name!r}, but {_names(listed)}; name one with --model")


def _names(cards: Sequence[ModelCard]) -> str:
    return ", ".join(repr(card.id) for card in cards)


def _block_size(servers: Sequence[VllmServer], metrics: Sequence[MetricsReading]) -> int:
    sizes = {reading.block_size(rank) for reading in metrics for rank in reading.ranks}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        raise EngineFailed(
            f"{servers[0].base}/metrics does not tell one block size of all ranks (vllm:cache_config_info);"
            " represent this version of vLLM with --engine openai"
        )
    return size


def _tokenizer(config: VllmConfig, root: str | None) -> bytes | None:
    """Return the archive of the model's tokenizer. None: it is not on this machine."""
    folder = config.tokenizer or root
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        if config.tokenizer is not None:
            raise EngineFailed(f"--tokenizer {config.tokenizer}: there is no tokenizer.json in this folder")
        return None
    files = {name: Path(folder) / name for name in _ARCHIVED}
    if config.chat_template is not None:
        if not Path(config.chat_template).is_file():
            raise EngineFailed(f"chat_template = {config.chat_template!r} is no file")
        files["chat_template.jinja"] = Path(config.chat_template)
    try:
        return archived({name: path.read_bytes() for name, path in files.items() if path.exists()})
    except OSError as error:
        raise EngineFailed(f"the tokenizer in {folder} cannot be read: {error}") from error
