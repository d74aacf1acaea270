"""The subscriber in docs/events.md, run as a reader would run it, without knowledge of Roost."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.security.credentials import ServerCredentials
from fleet.facts.migrations import MigrationAborted, MigrationPlanned

DOCS = Path(__file__).resolve().parents[2] / "docs"


def program() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "events.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_it_has_eleven_lines_and_needs_no_roost() -> None:
    assert len([line for line in program().splitlines() if line.strip()]) <= 11
    assert not re.search(r"import.*\b(bus|fleet|deploy)\b", program())


async def test_it_prints_what_was_stored_before_it_came_and_what_comes(
    tmp_path: Path, nats_server_type: Any
) -> None:
    folder, subjects = tmp_path / ".local/state/roost/run-1-ab/bus", Subjects()
    folder.mkdir(parents=True)
    credentials = ServerCredentials(folder, subjects, ())
    (tmp_path / "nats.conf").write_text(f"jetstream: enabled\n{credentials.authorization()}")
    server = nats_server_type(tmp_path / "store", "-c", str(tmp_path / "nats.conf"))
    server.start()
    credentials.write_files(server.url)
    bus = await NatsBus.connect(server.url, subjects, BusConfig(credentials_file=credentials.file("planner")))
    before = MigrationPlanned(
        engine="e0",
        worker_id=2**64 - 1,
        plan="cafe",
        origin="operator",
        base_epoch=3,
        handovers=1,
        copies=2,
        bytes=34,
        reason="asked for",
    )
    after = MigrationAborted(
        engine="e0",
        worker_id=2**64 - 1,
        plan="cafe",
        handover=5,
        number=0,
        epoch=4,
        reason="no room",
        fault="room",
    )
    await bus.record(subjects.migrations("e0"), before)
    environment = {**os.environ, "HOME": str(tmp_path)}
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-I", "-c", program(), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert reader.stdout is not None
    try:
        async with asyncio.timeout(20):
            assert (
                await reader.stdout.readline()
                == b"MigrationPlanned e0 cafe copies=2 bytes=34 reason=asked for\n"
            )
            await bus.record(subjects.migrations("e0"), after)
            assert (
                await reader.stdout.readline()
                == b"MigrationAborted e0 cafe epoch=4 seconds=0.0 reason=no room\n"
            )
    finally:
        reader.kill()
        await reader.wait()
        await bus.close()
        server.stop()
