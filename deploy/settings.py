"""Sections of roost.toml, and defaults for choices that a part leaves to the composition root."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bus.config import BusConfig
from bus.protocol.subjects import check_token
from deploy.config import Configuration, Key, load
from deploy.telemetry.tracing_config import TracingConfig
from engine_adapter.config import AgentConfig, EmbeddedConfig, TransferConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.settings import FilePath
from migration.config import MigrationConfig
from router.config import RouterConfig
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
    drain_seconds: float = 3.0
    """time for open requests to finish when a rank is stopped"""
    ready_seconds: float = 120.0
    """from the start of the processes to the engine's join"""
    grace_seconds: float = 6.0
    """from asking a process to end to killing it"""

    def __post_init__(self) -> None:
        check_token("engine name", self.name)
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"host must be an address under which routers reach this machine, not {self.host!r}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        _check_above_zero(self, "drain_seconds", "ready_seconds", "grace_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of `roost up`. Raises ValueError with the name of a setting out of range."""

    engines: int = 1
    nats: str | None = None
    """URL of a running NATS server; unset: start a private one"""
    log_level: str = "info"
    """level of every part: debug, info, warning or error"""
    log_format: str = "text"
    """log lines on standard error: text, or json for one object per line; request lines are always JSON"""
    access_log: str = "-"
    """destination of the router's request lines: a file, which may be rotated; "-" for standard output;
    "none" for nowhere"""

    def __post_init__(self) -> None:
        if not 0 <= self.engines <= 64:
            raise ValueError(f"engines must be 0..64, not {self.engines}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"log_level must be debug, info, warning or error, not {self.log_level!r}")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format must be text or json, not {self.log_format!r}")
        if not self.access_log:
            raise ValueError('access_log must name a file, or be "-" (standard output) or "none"')


DEMO_MODEL = "roost-demo"
SECTIONS: Mapping[str, type] = {
    "bus": BusConfig,
    "router": RouterConfig,
    "tracker": TrackerConfig,
    "planner": MigrationConfig,
    "engine": EmbeddedConfig,
    "simulated": SimulatedConfig,
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


def read_settings(file: Path | None, environment: Mapping[str, str], directory: Path) -> Configuration:
    """Return the effective configuration before the command's flags. Raises ConfigError as
    `deploy.config.load` does."""
    return load(
        SECTIONS,
        defaults=DEFAULTS,
        file=file,
        environment=environment,
        directory=directory,
        checks={EmbeddedConfig: _check_files},
    )


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


def _check_above_zero(config: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be above 0, not {getattr(config, name)}")
