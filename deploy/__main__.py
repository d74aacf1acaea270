"""`python -m deploy LAUNCH_SPEC`: child process of a supervisor, without the import cost of the command line.
People use `roost`."""

import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bus.config import BusConfig
from deploy.configuration_loader import ConfigError, Configuration
from deploy.http.sockets import CannotListen, adopt
from deploy.launch_spec import LaunchSpec
from deploy.parts.launch import run_part
from deploy.process import FINAL, print_error
from deploy.reload import planner_settings, router_settings
from deploy.sections import WorkerConfig, named_engine, read_settings
from engine_adapter.config import AgentConfig, TransferConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.settings import FilePath
from migration.config import MigrationConfig
from router.config import RouterConfig
from tracker.config import TrackerConfig


def main(arguments: list[str]) -> int:
    """Run the part that the launch spec names. Returns the exit status."""
    try:
        launch = msgspec.json.decode(arguments[0], type=LaunchSpec)
        settings = read_settings(Path(launch.config), {}, Path.cwd())
        return run_part(launch.part, settings, os.environ, *_arguments(launch, settings))
    except (IndexError, msgspec.DecodeError):
        print_error("this is for supervisors; the command for people is `roost`")
    except (ConfigError, CannotListen) as error:
        print_error(str(error))
    return FINAL


def _arguments(launch: LaunchSpec, settings: Configuration) -> tuple[Any, ...]:
    """Return the arguments of the part's `serve` function."""
    bus, ready = settings.part(BusConfig), Path(launch.ready)
    if launch.credentials is not None:
        bus = replace(bus, credentials_file=FilePath(launch.credentials))

    def read() -> Configuration:
        return read_settings(Path(launch.config), {}, Path.cwd())

    match launch.part:
        case "tracker":
            return bus, settings.part(TrackerConfig), ready
        case "planner":
            return bus, settings.part(MigrationConfig), ready, planner_settings(settings, read)
        case "router":
            listener = _listener(launch)
            private = None if launch.private is None else adopt(launch.private)
            part, reread = settings.part(RouterConfig), router_settings(settings, read)
            return listener, bus if launch.bus else None, part, ready, private, reread
    of_rank = [settings.part(kind) for kind in (AgentConfig, TransferConfig, WorkerConfig)]
    engine_bus = bus if launch.bus else None
    if launch.part == "simulated":
        listeners = [adopt(descriptor) for descriptor in launch.descriptors]
        return listeners, launch.rank, engine_bus, settings.part(SimulatedConfig), *of_rank, ready
    return _listener(launch), launch.rank, engine_bus, named_engine(settings), *of_rank, ready


def _listener(launch: LaunchSpec) -> socket.socket:
    if launch.descriptor is None:
        raise CannotListen(f"the launch spec of a {launch.part} names no listening socket")
    return adopt(launch.descriptor)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Every part has stopped cleanly by now. Tearing down the interpreter and torch would cost another second.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
