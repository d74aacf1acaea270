"""`python -m deploy LAUNCH_SPEC`: child process of a supervisor, without the import cost of the command line.
People use `roost`."""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bus.config import BusConfig
from deploy.config import ConfigError, Configuration
from deploy.http.sockets import CannotListen, adopt
from deploy.launch_spec import LaunchSpec
from deploy.parts.launch import run_part
from deploy.process import FINAL, print_error
from deploy.reload import planner_settings, router_settings
from deploy.settings import WorkerConfig, named_engine, read_settings
from engine_adapter.config import AgentConfig, TransferConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.settings import FilePath
from migration.config import MigrationConfig
from router.config import RouterConfig
from tracker.config import TrackerConfig


def main(arguments: list[str]) -> int:
    """Run the part that the launch spec names. Returns the exit status."""
    try:
        order = msgspec.json.decode(arguments[0], type=LaunchSpec)
        settings = read_settings(Path(order.config), {}, Path.cwd())
        return run_part(order.part, settings, os.environ, *_arguments(order, settings))
    except (IndexError, msgspec.DecodeError):
        print_error("this is for supervisors; the command for people is `roost`")
    except (ConfigError, CannotListen) as error:
        print_error(str(error))
    return FINAL


def _arguments(order: LaunchSpec, settings: Configuration) -> tuple[Any, ...]:
    """Return the arguments of the part's `serve` function."""
    bus, ready = settings.part(BusConfig), Path(order.ready)
    if order.credentials is not None:
        bus = replace(bus, credentials_file=FilePath(order.credentials))

    def again() -> Configuration:
        return read_settings(Path(order.config), {}, Path.cwd())

    if order.part == "tracker":
        return bus, settings.part(TrackerConfig), ready
    if order.part == "planner":
        return bus, settings.part(MigrationConfig), ready, planner_settings(settings, again)
    if order.part == "simulated":
        doors = [adopt(descriptor) for descriptor in order.descriptors]
        return (
            doors,
            order.rank,
            bus,
            settings.part(SimulatedConfig),
            settings.part(AgentConfig),
            settings.part(TransferConfig),
            settings.part(WorkerConfig),
            ready,
        )
    if order.descriptor is None:
        raise CannotListen(f"the order of a {order.part} names no listening socket")
    if order.part == "router":
        private = None if order.private is None else adopt(order.private)
        return (
            adopt(order.descriptor),
            bus if order.bus else None,
            settings.part(RouterConfig),
            ready,
            private,
            router_settings(settings, again),
        )
    return (
        adopt(order.descriptor),
        order.rank,
        bus,
        named_engine(settings),
        settings.part(AgentConfig),
        settings.part(TransferConfig),
        settings.part(WorkerConfig),
        ready,
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Every part has stopped cleanly by now. Tearing down the interpreter and torch would cost another second.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
