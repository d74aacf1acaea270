"""Sections of roost.toml, and defaults for choices that a part leaves to the composition root."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from bus.config import BusConfig
from bus.protocol.subjects import check_token
from deploy.configuration_loader import Configuration, Key, load, variable_of
from deploy.telemetry.tracing_config import TracingConfig
from engine_adapter.config import AgentConfig, EmbeddedConfig, TransferConfig
from engine_adapter.dynamo.address import DynamoAddress
from engine_adapter.dynamo.requests import DisaggregationMode
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.vllm.config import VllmConfig
from fleet.settings import FilePath, Positive, check_bounds
from migration.config import MigrationConfig
from router.config import RouterConfig
from router.dynamo.config import DynamoConfig
from tracker.config import TrackerConfig

EngineKind = Literal["embedded", "simulated"]
"""engines that are part of Roost"""
DEMO_CHECKPOINT = Path(__file__).parent / "demo_model" / "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one engine under `roost worker` or `roost up`. Raises ValueError with the name of a setting
    out of range."""

    name: str = "engine"
    """name of the engine; `roost up` appends a number"""
    engine: EngineKind = "embedded"
    """embedded: Roost's own engine, as [engine] says; simulated: without weights, as [simulated] says"""
    dynamo: str | None = None
    """NAMESPACE or NAMESPACE.COMPONENT of a Dynamo deployment in which the engine serves as a worker;
    Dynamo's own variables DYN_... name its discovery and planes; unset: in none"""
    disaggregation_mode: DisaggregationMode = "agg"
    """part of requests that the engine serves in Dynamo. prefill: prompts, whose KV engines in the mode
    decode fetch; agg: both"""
    host: str = "127.0.0.1"
    """address that the ranks' HTTP servers listen on and routers connect to"""
    fleet_secret_file: Path | None = None
    """file with the secret that routers must present, the same for all ranks and routers; two lines during a
    rotation; unset: ranks accept every client"""
    tls_cert: Path | None = None
    """PEM file of the certificate for the name or address `host`; read again at a reload"""
    tls_key: Path | None = None
    """PEM file of its key, unencrypted"""
    tls_terminated: bool = False
    """a service mesh encrypts traffic between routers and ranks, so plain HTTP is allowed"""
    insecure: bool = False
    """allow listening for other machines without the fleet secret or TLS"""
    resume: bool = True
    """a restarted engine resumes its last placement and epoch; false: it starts as [engine] or [simulated]
    says"""
    drain_seconds: Positive = 3.0
    """time for open requests to finish when a rank is stopped"""
    ready_seconds: Positive = 120.0
    """from the start of the processes to the engine's join"""
    grace_seconds: Positive = 6.0
    """from asking a process to end to killing it"""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_token("engine name", self.name)
        if self.dynamo is not None:
            DynamoAddress.parse(self.dynamo)
        elif self.disaggregation_mode != "agg":
            raise ValueError(
                f"disaggregation_mode = {self.disaggregation_mode} is for an engine in Dynamo; set dynamo too"
            )
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"host must be an address under which routers reach this machine, not {self.host!r}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of `roost up`. Raises ValueError with the name of a setting out of range."""

    engines: Annotated[int, Meta(ge=0, le=64)] = 1
    nats: str | None = None
    """URL of a running NATS server; unset: start a private one"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """level of every part"""
    log_format: Literal["text", "json"] = "text"
    """log lines on standard error: text, or json for one object per line; request lines are always JSON"""
    access_log: str = "-"
    """destination of the router's request lines: a file, which may be rotated; "-" for standard output;
    "none" for nowhere"""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.access_log:
            raise ValueError('access_log must name a file, or be "-" (standard output) or "none"')


DEMO_MODEL = "roost-demo"
SECTIONS: Mapping[str, type] = {
    "bus": BusConfig,
    "router": RouterConfig,
    "dynamo": DynamoConfig,
    "tracker": TrackerConfig,
    "planner": MigrationConfig,
    "engine": EmbeddedConfig,
    "simulated": SimulatedConfig,
    "vllm": VllmConfig,
    "sglang": SglangConfig,
    "agent": AgentConfig,
    "transfer": TransferConfig,
    "worker": WorkerConfig,
    "up": UpConfig,
    "tracing": TracingConfig,
}
DEFAULTS: Mapping[Key, Any] = {
    ("engine", "checkpoint"): FilePath(str(DEMO_CHECKPOINT)),
    ("engine", "ranks"): 2,
}
RENAMED: Mapping[Key, str] = {
    ("bus", "reconnect_most_seconds"): "reconnect_max_seconds",
    ("planner", "judge_seconds"): "evaluation_seconds",
    ("planner", "least_gain"): "min_gain",
    ("planner", "least_pairs"): "min_pairs",
    ("planner", "most_cells"): "max_cells",
    ("planner", "most_questions"): "max_questions",
    ("planner", "most_replicas"): "max_replicas",
    ("planner", "most_steps"): "max_steps",
    ("router", "kept_bytes"): "kept_decisions_bytes",
    ("router", "least_retries"): "min_retries",
    ("router", "replicas"): "replicate_bookings",
    ("tracker", "most_cells"): "max_cells",
    ("tracker", "most_changes"): "max_changes",
    ("tracker", "most_models"): "max_models",
    ("tracker", "most_ranks"): "max_ranks",
    ("tracker", "most_token_changes"): "max_token_changes",
    ("tracker", "most_waiting"): "max_waiting",
    ("transfer", "least_seconds"): "min_seconds",
    ("transfer", "way"): "backend",
}
"""keys of earlier versions, with their new names in the same section"""
REMOVED: Mapping[Key, str] = {
    ("agent", "profile_blocks"): "signatures cover 1024 blocks of a request",
    ("bus", "answers_seconds"): "answers in parts are kept for 10 s",
    ("bus", "parcels_seconds"): "parcels are kept for 30 s",
    (
        "bus",
        "reconnect_first_seconds",
    ): "the first pause is 0.05 s",
    ("engine", "block_size"): "KV blocks hold 16 tokens",
    ("planner", "most_incarnations"): "1024 incarnations are remembered",
    ("router", "coalesce_seconds"): "bookings are sent at most every 0.005 s",
    ("router", "forget_after_seconds"): "a dead engine's state is kept for 600 s",
    ("router", "large_bodies_per_client"): "it is a quarter of large_bodies_waiting",
    ("router", "max_head_fields"): "a request may have 100 header fields",
    ("router", "most_outcomes_waiting"): "4096 outcomes may wait",
    ("simulated", "block_size"): "KV blocks hold 16 tokens",
    ("simulated", "lose_kv_share"): "order the fault lose_kv_events instead",
    ("simulated", "token_skew"): "it is 0.5",
    ("tracker", "cluster_prior_pairs"): "it is 128",
    ("tracker", "cluster_samples"): "it is 1024; cluster_bytes limits the memory",
    ("tracker", "least_tokens_per_second"): "it is 0.01",
    ("tracker", "longest_interval_seconds"): "it is 3600",
    ("tracker", "row_seconds"): "unused rows expire after 7200 s",
    ("tracker", "shift_settle"): "it is 0.5",
    ("tracker", "shortest_interval_seconds"): "it is 0.001",
    ("tracker", "token_seconds"): "it is 14400",
    ("tracker", "waiting_seconds"): "reports wait for 120 s; waiting_bytes limits their memory",
}
"""keys of earlier versions that no longer exist, with the value that holds instead"""


def read_settings(file: Path | None, environment: Mapping[str, str], directory: Path) -> Configuration:
    """Return the effective configuration before the command's flags. Raises ConfigError as
    `deploy.configuration_loader.load` does."""
    return load(
        SECTIONS,
        defaults=DEFAULTS,
        file=file,
        environment=environment,
        directory=directory,
        checks={EmbeddedConfig: _check_files},
        former=former_keys(),
    )


def former_keys() -> dict[Key, str]:
    """Return the keys of earlier versions, each with what to do instead."""
    renamed = {
        (section, old): f"is now called {new} ({variable_of(section, new)})"
        for (section, old), new in RENAMED.items()
    }
    return renamed | {key: f"is no longer a setting; delete it: {value}" for key, value in REMOVED.items()}


def _check_files(config: EmbeddedConfig) -> None:
    if config.placement is not None and not Path(config.placement).is_file():
        raise ValueError(
            f"embedded engine: placement = {config.placement!r}: name an existing file, or leave it out"
        )
    if config.checkpoint is not None and not Path(config.checkpoint).is_dir():
        raise ValueError(
            f"embedded engine: checkpoint = {config.checkpoint!r}: name an existing folder with config.json"
        )


def named_engine(settings: Configuration) -> EmbeddedConfig:
    """Return the engine's settings with the model's name: as set, else the demo model's, else the checkpoint
    folder's."""
    config = settings.part(EmbeddedConfig)
    folder = Path(config.folder).resolve()
    return replace(
        config, model=config.model or (DEMO_MODEL if folder == DEMO_CHECKPOINT.resolve() else folder.name)
    )


def engine_ranks(settings: Configuration) -> int:
    """Return the number of ranks of each engine started here."""
    simulated = settings.part(WorkerConfig).engine == "simulated"
    return settings.part(SimulatedConfig).ranks if simulated else settings.part(EmbeddedConfig).ranks


def served_model(settings: Configuration) -> str:
    """Return the model name that requests use for engines started here."""
    simulated = settings.part(WorkerConfig).engine == "simulated"
    return settings.part(SimulatedConfig).served_model if simulated else named_engine(settings).served_model
