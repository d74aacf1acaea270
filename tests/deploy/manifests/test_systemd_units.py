"""Units start commands that exist, with settings that exist, and give them time to stop."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.process import FINAL
from router.config import RouterConfig
from tests.deploy.manifests.started import ROOT, mounted, provide, start
from tracker.config import TrackerConfig

FOLDER = ROOT / "systemd"
UNITS = {
    "roost-router": "router",
    "roost-planner": "planner",
    "roost-tracker": "tracker",
    "roost-agent@": "vllm",
}


def keys(name: str) -> dict[str, list[str]]:
    """The unit's keys with their values, in order."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / f"{name}.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value.replace("%i", "e0"))
    return found


def variables(name: str) -> dict[str, str]:
    given = list(keys(name)["Environment"])
    if "EnvironmentFile" in keys(name):
        lines = (FOLDER / "agent.env.example").read_text().splitlines()
        given += [line for line in lines if not line.startswith("#")]
    return dict(pair.split("=", 1) for pair in given)


@pytest.mark.parametrize(("name", "part"), UNITS.items())
def test_a_unit_starts_its_part(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: None
) -> None:
    provide(tmp_path)
    (command,) = keys(name)["ExecStart"]
    program, *arguments = shlex.split(mounted(command, tmp_path))
    assert program.endswith("/bin/roost")
    given = {key: mounted(value, tmp_path) for key, value in variables(name).items()}
    started = start(monkeypatch, arguments, given)
    assert started.part == part
    if part == "router":
        config = started.settings.part(RouterConfig)
        longest = config.pre_stop_seconds + config.drain_seconds
        assert float(keys(name)["TimeoutStopSec"][0]) > longest
    if part == "tracker":
        state = started.settings.part(TrackerConfig).state_file
        assert str(state).startswith(f"{tmp_path}/var/lib/{keys(name)['StateDirectory'][0]}/")


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_has_a_user_of_its_own_and_may_write_only_its_state(name: str) -> None:
    unit = keys(name)
    declared = re.findall(r"^u (\S+)", (FOLDER / "roost.sysusers.conf").read_text(), re.MULTILINE)
    assert unit["User"][0] in declared
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["RestartPreventExitStatus"] == [str(FINAL)]


def test_each_part_has_another_user() -> None:
    users = [keys(name)["User"][0] for name in UNITS]
    assert len(set(users)) == len(users)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd checks its own units")
def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    for name in UNITS:
        text = (FOLDER / f"{name}.service").read_text().replace("/opt/roost/bin/roost", "/bin/true")
        (tmp_path / f"{name}.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(map(str, tmp_path.glob("*.service")))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert not complaints
