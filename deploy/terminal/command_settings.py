"""Settings of commands: from options, file and environment, and from the running fleet."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bus.config import BusConfig
from bus.protocol.roles import Role
from deploy.configuration_loader import ConfigError, Configuration, Key
from deploy.reload import Read
from deploy.run_directory import Running, home, live_runs
from deploy.sections import WorkerConfig, read_settings
from deploy.security.credentials import of_run
from deploy.security.exposure import missing_at_ranks, missing_at_router, missing_in_dynamo
from deploy.security.tls import CertificateError, ServerTls
from deploy.terminal.output import USAGE, fail
from engine_adapter.serving.authentication import NoSecret, RouterAuthentication
from fleet.redaction import without_secrets
from router.config import RouterConfig
from router.credentials import RouterCredentials

Flags = Mapping[Key, tuple[str, Any]]


def settings_reader(file: Path | None, flags: Flags, role: Role | None = None) -> Read:
    """Return a function that reads file and environment, and applies the flags. role: with its login, if the
    NATS server is that of this user's running fleet."""

    def read() -> Configuration:
        settings = read_settings(file, os.environ, Path.cwd()).with_flags(flags)
        if role is None:
            return settings
        return with_login(settings, role, settings.part(WorkerConfig).name if role == "engine" else None)

    return read


def checked(read: Read, *parts: type) -> Configuration:
    """Return the effective configuration; end the command if these parts cannot use it."""
    try:
        settings = read()
        settings.check(*parts)
    except ConfigError as error:
        fail(str(error), USAGE)
    return settings


def settings_from(file: Path | None, flags: Flags, *parts: type) -> Configuration:
    """Return the effective configuration of a command that reads it once."""
    return checked(settings_reader(file, flags), *parts)


def security_flags(
    section: str, cert: Path | None, key: Path | None, *, terminated: bool, insecure: bool
) -> Flags:
    """Return the settings from `--tls-cert`, `--tls-key`, `--tls-terminated` and `--insecure`."""
    return {
        (section, "tls_cert"): ("--tls-cert", cert),
        (section, "tls_key"): ("--tls-key", key),
        (section, "tls_terminated"): ("--tls-terminated", terminated or None),
        (section, "insecure"): ("--insecure", insecure or None),
    }


def check_router_security(config: RouterConfig) -> None:
    """End the command if the router's listen address lacks its security, or a file of keys, secrets or
    certificates is unusable."""
    _secured(missing_at_router(config), insecure=config.insecure)
    try:
        RouterCredentials.read(config)
        ServerTls.of(config.tls_cert, config.tls_key)
    except (OSError, ValueError) as error:
        fail(str(error), USAGE)


def check_rank_security(config: WorkerConfig, *, secret_is_made: bool = False) -> None:
    """Check the listen addresses of an engine's ranks in the same way. secret_is_made: the command generates
    the fleet secret, if no file is set."""
    _secured(missing_at_ranks(config, secret_is_made=secret_is_made), insecure=config.insecure)
    _secured(missing_in_dynamo(config, os.environ), insecure=config.insecure)
    try:
        RouterAuthentication(config.fleet_secret_file)
        ServerTls.of(config.tls_cert, config.tls_key)
    except (NoSecret, CertificateError) as error:
        fail(str(error), USAGE)


def check_engine_installed(settings: Configuration) -> None:
    """End the command when its engines compute with torch or serve in Dynamo, and what that needs is not
    installed."""
    if settings.part(WorkerConfig).dynamo is not None and find_spec("dynamo") is None:
        fail("an engine in Dynamo (--dynamo) needs Dynamo's runtime: pip install 'roost[dynamo]'", USAGE)
    embedded = settings.part(WorkerConfig).engine == "embedded"
    missing = [name for name in ("torch", "safetensors") if embedded and find_spec(name) is None]
    if missing:
        fail(
            f"the embedded engine needs {' and '.join(missing)}: pip install 'roost[engine]', or choose"
            " --engine simulated",
            USAGE,
        )


def _secured(complaint: str | None, *, insecure: bool) -> None:
    if complaint is not None and not insecure:
        fail(f"{complaint}; --insecure does so all the same", USAGE)


def engine_flags(
    file: Path | None,
    kind: str | None,
    *,
    ranks: int | None,
    checkpoint: Path | None,
    model_shape: str | None,
) -> Flags:
    """Return the settings from `--engine`, `--ranks`, `--model` and `--model-shape`; end the command if one
    belongs to another engine kind.

    kind: as given; None: as configured.
    """
    given: Flags = {("worker", "engine"): ("--engine", kind)}
    chosen = settings_from(file, given, WorkerConfig).part(WorkerConfig).engine
    if chosen == "simulated":
        refuse({"--model": checkpoint}, "belongs to --engine embedded, and these engines are simulated")
        return {
            **given,
            ("simulated", "ranks"): ("--ranks", ranks),
            ("simulated", "shape"): ("--model-shape", model_shape),
        }
    refuse({"--model-shape": model_shape}, "belongs to --engine simulated, and these engines are embedded")
    return {
        **given,
        ("engine", "ranks"): ("--ranks", ranks),
        ("engine", "checkpoint"): ("--model", checkpoint),
    }


def refuse(options: Mapping[str, object], why: str) -> None:
    """End the command if one of these options or arguments was given. why: completes the sentence that its
    name begins."""
    for name, value in options.items():
        if value is not None and value is not False:
            fail(f"{name} {why}", USAGE)


def running() -> Running | None:
    """Return this user's running `roost up`; end the command if there are several."""
    found = [run for run in live_runs(home(os.environ)) if run.nats]
    one_server([str(run.nats) for run in found])
    return found[0] if found else None


def one_server(servers: Sequence[str]) -> None:
    """End the command if there are several NATS servers to choose from."""
    if len(servers) > 1:
        fail(
            f"several fleets are running; name one with --nats: {', '.join(map(without_secrets, servers))}",
            USAGE,
        )


def router_processes(servers: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of single router processes of this user's runs on any of these NATS servers."""
    return tuple(
        url
        for run in live_runs(home(os.environ))
        if set(str(run.nats).split(",")) & set(servers)
        for url in run.routers
    )


def router_url(settings: Configuration) -> str:
    """Return the URL of the configured router, or that of the running fleet."""
    chosen = settings.part(RouterConfig)
    if all(
        setting.source == "default"
        for (section, key), setting in settings.items()
        if section == "router" and key in ("host", "port")
    ):
        run = running()
        if run is not None and run.router is not None:
            return run.router
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(chosen.host, chosen.host)
    return f"http{'' if chosen.tls_cert is None else 's'}://{host}:{chosen.port}"


def key_from(file: Path | None) -> str | None:
    """Return the key in a file; end the command if it cannot be read."""
    try:
        return None if file is None else file.read_text(encoding="utf-8").split("\n")[0].strip()
    except OSError as error:
        fail(str(error), USAGE)


def access_log_flag(named: str | None) -> Flags:
    """Return the setting from `--access-log`: a file, relative to this working directory, or one of the words
    "-" and "none"."""
    return {
        ("up", "access_log"): (
            "--access-log",
            named if named in (None, "-", "none") else str(Path(named).absolute()),
        )
    }


def bus_flags(nats: str | None) -> Flags:
    """Return the setting from `--nats`: one URL, or several of one cluster separated by commas."""
    return {("bus", "urls"): ("--nats", None if nats is None else nats.split(","))}


def names_bus(settings: Configuration) -> bool:
    """Return whether a source other than the defaults sets the NATS server."""
    sources = dict(settings.items())
    return any(sources["bus", key].source != "default" for key in ("url", "urls"))


def bus_from(config: Path | None, nats: str | None) -> BusConfig:
    """Return the bus configuration (--nats, the configuration, or the running fleet), with the operator's
    login on a fleet of this user."""
    return with_login(with_bus(settings_from(config, bus_flags(nats), BusConfig)), "operator").part(BusConfig)


def with_login(settings: Configuration, role: Role, engine: str | None = None) -> Configuration:
    """Return the configuration with a role's login on the NATS server of this user's running fleet; unchanged
    if another server or login is set."""
    bus = settings.part(BusConfig)
    if bus.credentials_file is not None:
        return settings
    for run in live_runs(home(os.environ)):
        if run.credentials is not None and set(str(run.nats).split(",")) & set(bus.servers):
            return settings.with_flags(
                {("bus", "credentials_file"): ("the running fleet", of_run(run, role, engine))}
            )
    return settings


def with_bus(settings: Configuration) -> Configuration:
    """Return the configuration with the running fleet's NATS address if none was set."""
    if names_bus(settings):
        return settings
    run = running()
    return (
        settings
        if run is None
        else settings.with_flags(
            {
                ("bus", "urls"): ("the running fleet", str(run.nats).split(",")),
                ("bus", "namespace"): ("the running fleet", run.namespace),
            }
        )
    )
