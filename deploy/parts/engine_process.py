"""Common code of processes with ranks or with the agent of a static backend."""

import socket
from typing import Protocol

from deploy.launch_spec import RankLaunch
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.engine import EngineFailed


class RunningEngine(Protocol):
    """Engine as far as it is run here."""

    async def run(self) -> None: ...


async def run_engine(engine: RunningEngine, agent: Agent) -> None:
    """Run an engine until it fails; its agent then leaves the fleet with the reason."""
    try:
        await engine.run()
    except EngineFailed as error:
        agent.leaving(str(error))
        raise


def identity(launch: RankLaunch, nodes: tuple[str, ...] = ()) -> AgentIdentity:
    """Return the identity of an engine's incarnation on this machine. nodes: simulated machines, by rank."""
    return AgentIdentity(
        engine=launch.engine,
        worker_id=launch.worker_id,
        node=socket.gethostname(),
        urls=launch.urls,
        nodes=nodes,
        replaces=launch.replaces,
    )
