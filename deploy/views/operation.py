"""Output of operators' commands: draining, and reloading the settings."""

import asyncio
import os
import signal
from collections.abc import Sequence

import typer

from bus import Bus, Subscription
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.drains import DrainTarget, NoSuchTarget, drain, find, undrain, until_idle
from deploy.process import FAILURE
from deploy.run_directory import Running
from deploy.security.credentials import of_run
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import fail, in_json, note, show
from deploy.views.drain_report import drained, end_unless_idle
from fleet.facts.engines import ConfigChanged
from fleet.settings import FilePath


def show_drain(
    bus_config: BusConfig, place: str, *, undo: bool, wait: float | None, reason: str, as_json: bool
) -> None:
    """Drain a target, or undo it. With `wait`, wait that many seconds until it is idle. Ends the command with
    status 1 if it takes longer."""

    async def work(bus: Bus, subjects: Subjects) -> tuple[DrainTarget, bool, bool | None]:
        found = await find(bus, subjects, place)
        if undo:
            return found, await undrain(bus, subjects, found), None
        await drain(bus, subjects, found, reason)
        return found, True, None if wait is None else await until_idle(bus, subjects, found, wait, note)

    try:
        found, changed, idle = on_bus(bus_config, work)
    except NoSuchTarget as error:
        fail(str(error))
    joined = found.engine.joined
    if as_json:
        about = {
            "engine": joined.engine,
            "worker_id": str(joined.worker_id),
            "rank": found.rank,
            "draining": not undo,
            "reason": reason,
        }
        show(in_json({**about, "changed": changed, "idle": idle}))
    elif not changed:
        show(f"{found.name} was not draining")
    else:
        show(drained(found.name, f"{found.name} --undo", undo=undo, idle=idle))
    end_unless_idle(found.name, idle, wait)


def show_reload(runs: Sequence[Running], seconds: float, *, as_json: bool) -> None:
    """Ask runs on one NATS server to reload their settings, and print the answers of their routers and
    planners. Ends the command with status 1 if one refuses."""
    parts = sum(max(len(run.routers), 1) + 1 for run in runs)

    async def work(bus: Bus, subjects: Subjects) -> list[ConfigChanged]:
        async with bus.subscribe(subjects.config()) as subscription:
            for run in runs:
                os.kill(run.pid, signal.SIGHUP)
            return await _reports(subscription, parts, seconds)

    login = of_run(runs[0], "operator")
    config = BusConfig(
        urls=tuple(str(runs[0].nats).split(",")),
        namespace=runs[0].namespace,
        credentials_file=None if login is None else FilePath(str(login)),
    )
    reports = on_bus(config, work)
    if as_json:
        show(in_json(reports))
    else:
        for one in reports:
            _print(one)
    if len(reports) < parts and not any(one.refused for one in reports):
        fail(f"not every router and planner answered within {seconds:g} s; their logs say why")
    if any(one.refused for one in reports):
        raise typer.Exit(FAILURE)


async def _reports(subscription: Subscription, parts: int, seconds: float) -> list[ConfigChanged]:
    """Return the answer of each router and planner, or of their supervisor, if that refuses."""
    reports: list[ConfigChanged] = []
    try:
        async with asyncio.timeout(seconds):
            async for received in subscription:
                if isinstance(received.message, ConfigChanged):
                    reports.append(received.message)
                    if received.message.part not in ("router", "planner") or len(reports) == parts:
                        break
    except TimeoutError:
        pass  # the caller reports the missing ones
    return reports


def _print(report: ConfigChanged) -> None:
    if report.refused is not None:
        note(f"refused: {report.refused}")
    elif not report.changed:
        show(f"{report.part}: nothing differs")
    for name, (before, after) in report.changed.items():
        show(f"{report.part}: {name} = {after}  (was {before})")
