"""Children and units: what ends, ends; what may come back, comes back, a bounded number of times."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy.local.supervise import Child, Command, Incarnation, Policy, Unit, UnitFailed, tail

Script = Callable[..., Command]
FOREVER = "import time; print('up'); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
QUICK = Policy(
    ready_seconds=5,
    grace_seconds=0.5,
    crash_grace_seconds=0.5,
    first_pause_seconds=0.01,
    longest_pause_seconds=0.02,
    failures=2,
)


def launcher(*commands: Command) -> Callable[[], Awaitable[Incarnation]]:
    async def launch() -> Incarnation:
        return Incarnation(commands)

    return launch


def gone(pids: Iterable[int]) -> bool:
    """No such process, or only its unread exit status."""
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    )


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 the state of other processes has no event to wait for
            await asyncio.sleep(0.01)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(
    script: Script, tmp_path: Path
) -> None:
    child = await Child.start(script(DEAF))
    await until(lambda: "up" in tail(tmp_path / "child.log"))
    await child.stop(0.1)
    assert child.ended == -signal.SIGKILL
    assert child.ending() == "child was ended by SIGKILL"


async def test_a_stopped_child_is_ended(script: Script) -> None:
    child = await Child.start(script(FOREVER))
    child.signal(signal.SIGSTOP)
    await child.stop(0.1)
    assert gone([child.pid])


async def test_a_command_that_does_not_exist_ends_with_its_reason_in_the_log(
    script: Script, tmp_path: Path
) -> None:
    child = await Child.start(replace(script(""), arguments=["/no/such/program"]))
    assert await child.wait() == 127
    assert "cannot run /no/such/program: No such file or directory" in tail(tmp_path / "child.log")


async def test_a_child_has_its_own_process_group_so_that_ctrl_c_reaches_the_supervisor_alone(
    script: Script,
) -> None:
    child = await Child.start(script(FOREVER))
    try:
        assert os.getpgid(child.pid) == child.pid
    finally:
        await child.stop(0.5)


@pytest.mark.parametrize("state", ["running", "stopped"])
async def test_children_end_when_their_parent_is_killed_with_minus_nine(tmp_path: Path, state: str) -> None:
    program = f"""
import asyncio, os, signal, sys
from pathlib import Path
from deploy.local.supervise import Child, Command
async def main():
    log = Path({str(tmp_path)!r}) / "log"
    children = [await Child.start(Command(str(n), [sys.executable, "-S", "-u", "-c", {FOREVER!r}], log)) for n in range(2)]
    while log.read_text().count("up") < 2:
        await asyncio.sleep(0.01)
    if {state!r} == "stopped":
        children[0].signal(signal.SIGSTOP)
    print(*(child.pid for child in children), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    assert not gone(pids)
    parent.kill()
    await parent.wait()
    await until(lambda: gone(pids))


async def test_a_child_whose_parent_is_gone_before_it_starts_does_not_run(tmp_path: Path) -> None:
    other = 1  # alive, but not the parent
    path = Path(__file__).parents[3] / "deploy" / "local" / "parent_death.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(path),
        str(other),
        "touch",
        str(tmp_path / "ran"),
        stderr=subprocess.PIPE,
    )
    assert b"the parent process is gone" in (await process.communicate())[1]
    assert not (tmp_path / "ran").exists()


async def test_when_one_child_of_a_unit_ends_the_others_are_ended_and_all_start_anew(script: Script) -> None:
    output: list[str] = []
    async with Unit(
        "engine", launcher(script(FOREVER, "a"), script(FOREVER, "b")), QUICK, output.append
    ) as unit:
        await unit.ready()
        first = list(unit.children)
        os.kill(first[0].pid, signal.SIGKILL)
        await until(lambda: len(unit.children) == 2 and unit.children[0] is not first[0])
        await unit.ready()
        assert gone(child.pid for child in first)
        second = [child.pid for child in unit.children]
    assert gone(second)
    assert output == ["engine: a was ended by SIGKILL; starting it again in 0.0 s", "engine serves again"]


async def test_a_unit_that_never_became_ready_is_given_up_with_the_end_of_its_log(script: Script) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def launch() -> Incarnation:
        return Incarnation([script("print('port 4222 is taken'); raise SystemExit(3)")], ready=never)

    async with Unit("nats", launch, QUICK, print) as unit:
        with pytest.raises(
            UnitFailed, match=r"(?s)nats: child ended with status 3.*child\.log.*port 4222 is taken"
        ):
            await unit.ready()


async def test_a_unit_that_is_not_ready_in_time_is_ended(script: Script) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def launch() -> Incarnation:
        return Incarnation([script(FOREVER)], ready=never)

    async with Unit("router", launch, replace(QUICK, ready_seconds=0.3), print) as unit:
        with pytest.raises(UnitFailed, match="not ready after 0 s"):
            await unit.ready()
        assert gone(child.pid for child in unit.children)


async def test_restarts_are_bounded(script: Script) -> None:
    output: list[str] = []
    async with Unit(
        "router", launcher(script("import time; time.sleep(0.2); raise SystemExit(1)")), QUICK, output.append
    ) as unit:
        with pytest.raises(UnitFailed, match="router: child ended with status 1"):
            await unit.failed()
    assert sum("starting it again" in line for line in output) == QUICK.failures


async def test_a_child_that_says_it_would_fail_again_is_not_restarted(script: Script) -> None:
    output: list[str] = []
    async with Unit(
        "engine", launcher(script("import time; time.sleep(0.2); raise SystemExit(2)")), QUICK, output.append
    ) as unit:
        with pytest.raises(UnitFailed, match="engine: child ended with status 2"):
            await unit.failed()
    assert output == []


async def test_a_child_that_no_longer_answers_is_replaced(script: Script) -> None:
    probes = 0

    async def deaf() -> None:
        nonlocal probes
        probes += 1
        if probes <= 2:
            raise ConnectionRefusedError

    async def launch() -> Incarnation:
        return Incarnation([script(FOREVER)], healthy=deaf)

    output: list[str] = []
    async with Unit(
        "router", launch, replace(QUICK, health_seconds=0.02, health_misses=2), output.append
    ) as unit:
        await unit.ready()
        await until(lambda: bool(output))
        await unit.ready()
    assert output == [
        "router: no answer to 2 health probes; starting it again in 0.0 s",
        "router serves again",
    ]


async def test_units_that_serve_in_each_others_place_are_ended_for_silence_one_at_a_time(
    script: Script,
) -> None:
    """As on an overloaded machine, where no probe is answered in time."""
    policy = replace(QUICK, health_seconds=0.02, health_misses=2, failures=1000)
    output: list[str] = []
    serving = asyncio.Event()
    lives: list[str] = []
    group: list[Unit] = []

    async def silent() -> None:
        raise ConnectionRefusedError

    def unit(name: str) -> Unit:
        async def ready() -> None:
            lives.append(name)
            if lives.count(name) > 1:  # a restart takes until the test says so
                await serving.wait()

        async def launch() -> Incarnation:
            return Incarnation([script(FOREVER)], ready=ready, healthy=silent)

        group.append(Unit(name, launch, policy, output.append, group))
        return group[-1]

    async with unit("one"), unit("two"):
        await until(lambda: len(lives) == 3)
        await asyncio.sleep(0.5)  # many probes
        assert len(output) == 1
        assert [one.is_ready for one in group].count(True) == 1
        serving.set()
        await until(lambda: {"one", "two"} <= {line.partition(":")[0] for line in output})


def test_pauses_double_up_to_a_bound() -> None:
    policy = Policy(first_pause_seconds=0.2, longest_pause_seconds=1.0)
    assert [policy.pause(failures) for failures in (1, 2, 3, 4, 50)] == [0.2, 0.4, 0.8, 1.0, 1.0]


async def test_stopping_a_unit_while_it_starts_leaves_nothing(script: Script) -> None:
    async with Unit(
        "engine", launcher(*(script(FOREVER, str(number)) for number in range(3))), QUICK, print
    ) as unit:
        await until(lambda: len(unit.children) >= 1)
    assert gone(child.pid for child in unit.children)
