"""`roost doctor`: check a deployment, and say how to mend what is wrong."""

import os
from pathlib import Path
from typing import Annotated

import typer

from bus.config import BusConfig
from deploy.run_directory import home, live_runs
from deploy.sections import WorkerConfig
from deploy.terminal.command_settings import (
    bus_from,
    router_processes,
    router_url,
    settings_from,
)
from deploy.terminal.options import CaOption, ConfigOption, JsonOption, NatsOption
from deploy.terminal.output import USAGE, fail, in_json, note, show
from router.config import RouterConfig

RoutersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--router",
        metavar="URL",
        help="Router to check; repeat for more.  \\[default: as configured, or that of the running fleet]",
    ),
]
LoginsOption = Annotated[
    Path | None,
    typer.Option(
        "--logins",
        metavar="FOLDER",
        help="Also check the rights of every login in this folder of `roost bus credentials`."
        "  \\[default: those of the running `roost up`]",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("doctor")(doctor)


def doctor(
    router: RoutersOption = None,
    logins: LoginsOption = None,
    ca: CaOption = None,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Check a deployment, say what is wrong and how to mend it. Nothing is changed.

    Checked are NATS (reachable, JetStream, room, the rights of its users), clocks, versions, parts, engines,
    HTTP servers and their certificates, and this machine's space, limits and secret files.

    Exit status 1: there are problems. Notes alone do not count.
    """
    # imports the NATS client, which not every command needs
    from deploy.doctor.examination import Examined, examined
    from deploy.process import run

    bus_config, settings = bus_from(config, nats), settings_from(config, {}, RouterConfig, WorkerConfig)
    part, worker = settings.part(RouterConfig), settings.part(WorkerConfig)
    subject = Examined(
        bus=bus_config,
        routers=tuple(router or router_processes(bus_config.servers) or (router_url(settings),)),
        run_directories=home(os.environ),
        logins=_logins(logins, bus_config),
        ca=ca or (None if part.upstream_ca is None else Path(part.upstream_ca)),
        secrets=(
            part.api_key_file,
            part.backend_key_file,
            part.fleet_secret_file,
            worker.fleet_secret_file,
            part.tls_key,
            worker.tls_key,
        ),
        certificates=tuple(
            (None if cert is None else Path(cert), None if key is None else Path(key))
            for cert, key in ((part.tls_cert, part.tls_key), (worker.tls_cert, worker.tls_key))
        ),
    )
    found = []

    async def work() -> None:
        found.extend(await examined(subject, lambda step: None if as_json else note(f"checking {step}")))

    if code := run(work(), expected=(OSError,), hint=""):
        raise typer.Exit(code)
    problems = [one for one in found if one.level == "problem"]
    if as_json:
        show(in_json({"ok": not problems, "nats": bus_config.where, "findings": found}))
    else:
        for one in found:
            show(f"{one.level:7}  {one.check}: {one.what}\n         {one.remedy}")
        if not found:
            show("nothing is wrong")
    if problems:
        raise typer.Exit(1)


def _logins(folder: Path | None, config: BusConfig) -> dict[str, Path]:
    """Return the credential files by user; end the command if the folder holds none."""
    if folder is not None:
        files = {file.stem: file for file in sorted(folder.glob("*.json"))}
        if not files:
            fail(f"--logins {folder}: there is no login (*.json)", USAGE)
        return files
    for run in live_runs(home(os.environ)):
        if run.credentials is not None and set(str(run.nats).split(",")) & set(config.servers):
            return {file.stem: file for file in sorted(Path(run.credentials).glob("*.json"))}
    return {}
