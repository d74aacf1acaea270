"""A fleet of trivial children: what it can do without, and the order in which it stops."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from deploy.local.fleet import Fleet, child_environment
from deploy.local.router_sockets import RouterSockets
from deploy.local.supervise import Command, Incarnation, Policy, Unit, UnitFailed
from deploy.run_directory import run_directory
from deploy.sections import read_settings
from tracker.config import TrackerConfig

Script = Callable[..., Command]
FOREVER = "import time; time.sleep(600)"
QUICK = Policy(
    ready_seconds=5,
    grace_seconds=1,
    crash_grace_seconds=0.5,
    first_pause_seconds=0.01,
    longest_pause_seconds=0.02,
    failures=1,
)


def final(seconds: float) -> str:
    """Ends after a while with the status that asks not to be started again."""
    return f"import time; time.sleep({seconds}); raise SystemExit(2)"


@pytest.fixture
def output() -> list[str]:
    return []


@pytest.fixture
async def fleet(tmp_path: Path, output: list[str]) -> AsyncIterator[Fleet]:
    with run_directory(tmp_path / "state") as run:
        async with Fleet(read_settings(None, {}, tmp_path), run, {}, output.append) as fleet:
            yield fleet


def unit(command: Command, policy: Policy = QUICK) -> Unit:
    async def launch() -> Incarnation:
        return Incarnation([command])

    return Unit(command.name, launch, policy, lambda _: None)


async def test_it_goes_on_without_one_of_two_engines_and_ends_with_the_last(
    fleet: Fleet, output: list[str], script: Script
) -> None:
    fleet.engine_units += [unit(script(final(0.2), "engine-0")), unit(script(final(0.8), "engine-1"))]
    await fleet.add(*fleet.engine_units, unit(script(FOREVER, "router")))
    with pytest.raises(UnitFailed, match="engine-1 ended with status 2"):
        await asyncio.wait_for(fleet.serve(), 10)
    assert [line.splitlines()[-1].strip() for line in output] == ["going on without engine-0"]


async def test_it_ends_when_a_part_is_given_up_that_there_is_one_of(fleet: Fleet, script: Script) -> None:
    fleet.engine_units.append(unit(script(FOREVER, "engine-0")))
    await fleet.add(*fleet.engine_units, unit(script(final(0.1), "router")))
    with pytest.raises(UnitFailed, match="router ended with status 2"):
        await asyncio.wait_for(fleet.serve(), 10)


async def test_a_secret_for_routers_alone_is_refused_before_anything_starts(
    tmp_path: Path, output: list[str]
) -> None:
    settings = read_settings(None, {"ROOST_ROUTER_FLEET_SECRET_FILE": str(tmp_path / "secret")}, tmp_path)
    with run_directory(tmp_path / "state") as run:
        async with Fleet(settings, run, {}, output.append) as fleet:
            with pytest.raises(
                UnitFailed, match=r"worker\.fleet_secret_file is not set.*set both, or neither"
            ):
                await fleet.start_up(RouterSockets((), ()))


class Reader:
    """A unit that is told of settings, once it serves."""

    name = "reader"

    def __init__(self, *, serves: bool) -> None:
        self.signals: list[int] = []
        self.answer = asyncio.Event()
        self.children = (self,)
        self._serves = serves

    async def ready(self) -> None:
        if not self._serves:
            await asyncio.Event().wait()

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self.answer.set()


async def test_a_part_that_is_being_started_again_keeps_no_other_from_its_new_settings(
    fleet: Fleet, tmp_path: Path
) -> None:
    starting, serving = Reader(serves=False), Reader(serves=True)
    fleet.reading_units += cast("list[Unit]", [starting, serving])
    reloading = asyncio.create_task(fleet.reload(lambda: read_settings(None, {}, tmp_path)))
    await asyncio.wait_for(serving.answer.wait(), 10)
    reloading.cancel()
    await asyncio.wait([reloading])
    assert (serving.signals, starting.signals) == ([signal.SIGHUP], [])


async def test_phases_stop_in_the_reverse_order(tmp_path: Path, script: Script) -> None:
    note = tmp_path / "order"
    leaves = (
        "import signal, time\ndef end(*_):\n    open({!r}, 'a').write({!r}); raise"
        " SystemExit\nsignal.signal(signal.SIGTERM, end); print('up'); time.sleep(600)"
    )
    with run_directory(tmp_path / "state") as run:
        async with Fleet(read_settings(None, {}, tmp_path), run, {}, print) as fleet:
            for name in ("nats", "engine", "router"):
                await fleet.add(
                    unit(script(leaves.format(str(note), f"{name} "), name), replace(QUICK, grace_seconds=5))
                )
            logs = [tmp_path / f"{name}.log" for name in ("nats", "engine", "router")]
            async with asyncio.timeout(10):
                while not all(log.exists() and "up" in log.read_text() for log in logs):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert note.read_text() == "router engine nats "


def test_children_get_their_settings_by_file_and_our_packages_first() -> None:
    found = child_environment(
        {"ROOST_ROUTER_PORT": "1", "PYTHONPATH": "/theirs", "PATH": "/bin", "OTEL_SERVICE_NAME": "x"}
    )
    assert "ROOST_ROUTER_PORT" not in found
    assert found["PYTHONPATH"] == os.pathsep.join([str(Path(__file__).resolve().parents[3]), "/theirs"])
    assert (found["PATH"], found["OTEL_SERVICE_NAME"], found["OMP_NUM_THREADS"]) == ("/bin", "x", "1")


def test_children_that_load_nixl_find_it_bounded_and_quiet_unless_the_user_says_otherwise() -> None:
    found = child_environment({"NIXL_LOG_LEVEL": "DEBUG"})
    assert (found["UCX_RCACHE_MAX_UNRELEASED"], found["NIXL_LOG_LEVEL"]) == ("1024", "DEBUG")


@pytest.mark.parametrize(
    ("set_to", "expected"), [(None, "tracker.state"), ("/elsewhere/tracker", "/elsewhere/tracker")]
)
async def test_a_tracker_that_is_started_again_finds_what_it_knew(
    set_to: str | None, expected: str, tmp_path: Path
) -> None:
    environment = {} if set_to is None else {"ROOST_TRACKER_STATE_FILE": set_to}
    with run_directory(tmp_path / "state") as run:
        async with Fleet(read_settings(None, environment, tmp_path), run, {}, lambda _: None) as fleet:
            answer = read_settings(fleet.write_files().config_file, {}, tmp_path).part(TrackerConfig)
        assert answer.state_file == str(run.path / expected)
