"""Find out what an SGLang server is: its model, its data-parallel ranks, and the sources of their KV
events."""

import logging
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.client import ModelCard
from engine_adapter.foreign.kv_source import KvSource, shifted
from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.sglang.model_shape import SglangModel, model_of
from engine_adapter.sglang.server import RankReading, ServerInfo, SglangServer
from fleet.blocks import BLOCK_SIZE

_UNKNOWN_CONTEXT = 131_072
_DEFAULT_BATCH = 8192
"""SGLang's chunk of a prefill if it does not state it."""
_PAIRED = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""Speculative algorithms whose KV events name pairs of tokens."""
_COUNTED = ("stat", "stat_approx")
"""Modes of the recorder whose files hold the counts of all ranks."""
RecorderUse = Literal["none", "ours", "eplb"]
"""none: it records nothing that is read here. ours: nothing else uses it. eplb: SGLang's EPLB does."""
log = logging.getLogger(__name__)


class FoundServer(NamedTuple):
    """An SGLang server, as found at one moment."""

    info: ServerInfo
    model: str
    max_context: int
    max_batch_tokens: int
    block_size: int
    kv_blocks: int
    """Of one rank."""
    ranks: tuple[int, ...]
    """Numbers of its data-parallel ranks."""
    kv: tuple[KvSource, ...]
    """Sources of KV events, by rank. Empty: they are not followed, for the reason that was logged."""
    tokenizer: CheckpointTokenizer
    experts: SglangModel | None
    """None: the model has none, or its config.json does not say."""

    @property
    def recorder(self) -> RecorderUse:
        """Use of the expert distribution recorder."""
        if self.info.expert_distribution_recorder_mode not in _COUNTED:
            return "none"
        return "eplb" if self.info.enable_eplb else "ours"


async def discover(config: SglangConfig, server: SglangServer) -> FoundServer:
    """Ask the server. EngineFailed when it does not answer, or cannot be represented."""
    info = await server.info()
    if info.disaggregation_mode not in (None, "null"):
        raise EngineFailed(
            f"{server.base} runs as {info.disaggregation_mode} of a disaggregated pair, which"
            " --engine sglang does not represent"
        )
    cards, readings = await server.models(), await server.loads()
    if not readings:
        raise EngineFailed(f"{server.base}/v1/loads names no rank")
    card = _base_card(cards, server.base)
    kv = kv_sources(config, info, readings, server.base)
    page = _block_size(info)
    block_size = page if page >= BLOCK_SIZE else BLOCK_SIZE
    tokens = max(readings[0].max_total_num_tokens, info.max_total_num_tokens)
    folder = _folder(config, info)
    return FoundServer(
        info=info,
        model=card.id,
        max_context=card.max_model_len or info.context_length or _UNKNOWN_CONTEXT,
        max_batch_tokens=_batch_tokens(info),
        block_size=block_size,
        kv_blocks=max(tokens, 0) // block_size,
        ranks=tuple(reading.dp_rank for reading in readings),
        kv=kv,
        tokenizer=_tokenizer(folder),
        experts=_experts(folder),
    )


def kv_sources(
    config: SglangConfig, info: ServerInfo, readings: tuple[RankReading, ...], base: str
) -> tuple[KvSource, ...]:
    """Return the sources of KV events by rank. Empty, with the reason in the log, if the blocks that they
    name cannot be followed."""
    why = ""
    if config.kv_endpoint is None and (info.kv_events is None or info.kv_events.publisher != "zmq"):
        why = (
            "it publishes no KV events; start SGLang with --page-size 64 --kv-events-config"
            ' \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\''
        )
    elif _block_size(info) < BLOCK_SIZE:
        why = f"its pages have only {_block_size(info)} tokens; start SGLang with --page-size 16 or more"
    elif (info.speculative_algorithm or "").upper() in _PAIRED:
        why = f"with {info.speculative_algorithm} its KV events name pairs of tokens"
    if why:
        log.warning("%s: prompts are routed by guesses, not by exact blocks: %s", base, why)
        return ()
    first = _first_source(config, info)
    return tuple(
        KvSource(
            shifted(first.endpoint, reading.dp_rank),
            first.replay_endpoint and shifted(first.replay_endpoint, reading.dp_rank),
            first.topic,
        ).reachable_from(base)
        for reading in readings
    )


def _first_source(config: SglangConfig, info: ServerInfo) -> KvSource:
    """Return the source of rank 0, as configured or as the server says."""
    stated = info.kv_events
    if config.kv_endpoint is not None or stated is None:
        return KvSource(config.kv_endpoint or "", config.kv_replay_endpoint)
    replay = stated.replay_endpoint_port_base
    return KvSource(
        f"tcp://{stated.endpoint_host}:{stated.endpoint_port_base}",
        # the replay socket is bound on the same host
        None if replay is None else f"tcp://{stated.endpoint_host}:{replay}",
        stated.topic,
    )


def _block_size(info: ServerInfo) -> int:
    stated = 0 if info.kv_events is None else info.kv_events.block_size
    return stated or info.page_size or 1


def _batch_tokens(info: ServerInfo) -> int:
    chunk = info.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else info.max_prefill_tokens or _DEFAULT_BATCH


def _base_card(cards: tuple[ModelCard, ...], base: str) -> ModelCard:
    found = next((card for card in cards if card.parent is None), None)
    if found is None:
        raise EngineFailed(f"{base}/v1/models lists no model")
    return found


def _folder(config: SglangConfig, info: ServerInfo) -> Path:
    """Return the folder of the tokenizer. EngineFailed when it is not on this machine."""
    named = config.tokenizer or info.tokenizer_path or info.model_path
    folder = Path(named)
    missing = [name for name in ("tokenizer.json", "config.json") if not (folder / name).is_file()]
    if missing:
        raise EngineFailed(
            f"{folder}: there is no {' and no '.join(missing)}; name a folder of this machine with the"
            " model's tokenizer.json and config.json (--tokenizer DIR)"
        )
    return folder


def _tokenizer(folder: Path) -> CheckpointTokenizer:
    try:
        return CheckpointTokenizer(folder)
    except (OSError, ValueError) as error:
        raise EngineFailed(f"the tokenizer in {folder} cannot be read: {error}") from error


def _experts(folder: Path) -> SglangModel | None:
    try:
        config: dict[str, Any] = msgspec.json.decode(
            (folder / "config.json").read_bytes(), type=dict[str, Any]
        )
        return model_of(config)
    except (OSError, ValueError) as error:
        log.warning("%s: the experts of the model are not known: %s", folder / "config.json", error)
        return None
