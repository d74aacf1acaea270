"""What a soak reports can be told and drawn."""

import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.rig.evidence import tell_soak
from fleet.facts.migrations import MigrationPlanned
from tests.system.fault_injection import GentleStop, Happened, Mishap, RouterKill
from tests.system.leak_watch import MIB, Epochs, Life
from tests.system.load_clients import Break, Open, Outcomes, Tide
from tests.system.test_soak import BROKEN_SECONDS, KINDS, Form, Soak, growing, rejudged, thinned

DOMAINS = ("c", "ja")
SWITCH = MigrationPlanned(
    engine="engine-0",
    worker_id=1,
    plan="p",
    origin="planner",
    base_epoch=0,
    handovers=1,
    copies=0,
    bytes=0,
    reason="turns to tp",
    policy="layout: regret",
)
TIDE = Tide("even", 1200.0, np.full(2, 0.5), np.full(2, 0.5))


def soak_of(outcomes: Outcomes, happened: Happened, kind: str = "simulated", switches: int = 0) -> Soak:
    """Twenty minutes that never were. switches: chosen for each engine."""
    looks = np.arange(0.0, 2400.0, 5.0)
    lives = [Life("nats", 7, looks.tolist(), [24 * MIB] * len(looks)), Life("router-0", 8, [3.0], [90 * MIB])]
    parts: dict[str, Any] = {
        "crowd": SimpleNamespace(outcomes=outcomes),
        "mischief": SimpleNamespace(happened=happened),
        "memories": SimpleNamespace(lives=lives, left_over=[]),
        "records": SimpleNamespace(
            history=lambda _: SimpleNamespace(migrations=[SWITCH] * switches, joins=[None])
        ),
        "movers": None,
    }
    soak = Soak(
        KINDS[kind],
        1200.0,
        6,
        [TIDE],
        epochs=Epochs(messages=9, committed=4),
        began=0.0,
        **cast("Any", parts),
    )
    soak.progress += [(60.0, 70, 60), (1200.0, 1500, 1499)]
    return soak


def reported(lost: list[str]) -> dict[str, Any]:
    happened = Happened(
        [
            Mishap(60.0, "NATS killed", "nats", "pid 7", 0.25),
            Mishap(90.0, "loop paused", "planner"),
            Mishap(80.0, "NATS killed", "nats", "", 1.5),
        ],
        gentle_stops=[
            GentleStop(200.0, "router-1", "aa", [streamed("finished"), streamed("finished")], [], 33.0)
        ],
    )
    outcomes = Outcomes(
        came=1500,
        answered=1499,
        seconds=[1.0],
        refused=Counter({503: 2}),
        lost=lost,
        streamed_seconds=[2.0, 30.0, 90.0, 95.0],
    )
    outcomes.asked_again.update({"broken": 3, "refused": 2})
    return soak_of(outcomes, happened).report(DOMAINS)


def streamed(outcome: Any, tag: str = "aa") -> Open:
    return Open(requested_at=100.0, stream=True, tag=tag, tokens=7, outcome=outcome)


def test_a_stream_that_a_gentle_stop_breaks_off_is_a_failure() -> None:
    stop = GentleStop(200.0, "router-1", "aa", [streamed("finished"), streamed("broken")], [], 33.0)
    soak = soak_of(Outcomes(), Happened(gentle_stops=[stop]))
    assert soak.failures() == ["gentle stop at 200.0 s: a stream of router-1 broke after 7 tokens"]
    assert [
        (one["streams_open"], one["finished"], one["broken"]) for one in soak.report(DOMAINS)["gentle_stops"]
    ] == [(2, 1, 1)]


@pytest.mark.parametrize(
    ("broken", "excused"),
    [
        (Break(100.0, 301.0, "aa", "broken"), True),  # its router was killed
        (Break(100.0, 301.0, "bb", "broken"), False),  # another one was
        (Break(100.0, 301.0, "", "broken"), True),  # it is not known which answered
        (Break(100.0, 301.0 + BROKEN_SECONDS, "aa", "broken"), False),  # too late
        (Break(500.0, 500.5, "", "broken"), True),  # not read any more by a router that stops
        (Break(490.0, 500.5, "", "broken"), False),  # it had been read
        (Break(500.0, 500.5, "cc", "broken"), False),  # it was being answered
    ],
)
def test_a_connection_may_break_with_a_killed_router_or_before_it_was_read(
    broken: Break, excused: bool
) -> None:
    happened = Happened(
        router_kills=[RouterKill(300.0, "aa")], gentle_stops=[GentleStop(500.0, "router-1", "cc", [], [])]
    )
    assert bool(soak_of(Outcomes(broken=[broken]), happened).failures()) != excused


@pytest.mark.parametrize("lost", [[], ["prompt 3 was never answered"]])
def test_the_report_of_a_soak_becomes_a_page_and_a_picture(tmp_path: Path, lost: list[str]) -> None:
    (tmp_path / "report").write_text(json.dumps(reported(lost), allow_nan=False))
    tell_soak(tmp_path / "report", tmp_path)
    page = (tmp_path / "soak.md").read_text()
    assert ("prompt 3 was never answered" in page) == bool(lost)
    assert ("Nothing failed" in page) != bool(lost)
    assert "| NATS killed | 2 | 1.5 s |\n| loop paused | 1 | - |" in page
    assert "| of these answered, each whole | 1,499 |" in page
    assert (
        "| answered when asked again: the router behind it was killed, or closed the connection before it had"
        " read the request | 3 |" in page
    )
    assert "| answered when asked again: refused with a status that says so | 2 |" in page
    assert "| answered at once | 1,494 |" in page
    assert "| 200 s | router-1 | 2 | 2 | 0 | 33 s |" in page
    assert "| streams answered, above 60 s | 2 |" in page
    assert "| nats | 1 | 24.0 | +0.0 MiB | +0.0 MiB |" in page
    assert "| nats (pid 7) | 25 | 24.0 | 24.0 | +0.0 MiB |" in page
    assert "(soak.svg)" in page
    drawn = (tmp_path / "soak.svg").read_text()
    assert "</svg>" in drawn
    kept = json.loads((tmp_path / "soak.json").read_text())
    tell_soak(tmp_path / "soak.json", tmp_path)
    again = (
        json.loads((tmp_path / "soak.json").read_text()),
        (tmp_path / "soak.md").read_text(),
        (tmp_path / "soak.svg").read_text(),
    )
    assert again == (kept, page, drawn), "all of it can be written anew from what was kept"


@pytest.mark.parametrize(("by_hand", "switches", "thrash"), [(0, 20, False), (0, 25, True), (5, 25, False)])
def test_an_engine_thrashes_that_switches_more_often_than_its_load_changes(
    by_hand: int, switches: int, thrash: bool
) -> None:
    happened = Happened(layouts=Counter({"engine-0": by_hand, "engine-1": by_hand}))
    soak = soak_of(Outcomes(), happened, "layouts", switches)
    # The clock counts from the machine's start, which may be less than twenty minutes ago.
    soak.began = time.monotonic() - soak.seconds
    assert [one.partition(":")[0] for one in soak.failures(over=False)] == ["thrash"] * 2 * thrash


def test_the_report_shows_the_layouts_of_every_engine(tmp_path: Path) -> None:
    happened = Happened([Mishap(60.0, "NATS killed", "nats")], layouts=Counter({"engine-1": 1}))
    soak = soak_of(Outcomes(), happened, "layouts", 2)
    soak.forms += [
        Form(at, count, {"engine-0": layout, "engine-1": "ep"})
        for at, count, layout in ((0.0, 1, "ep"), (5.0, 70, "tp"), (10.0, 3, "mixed"))
    ]
    (tmp_path / "report").write_text(json.dumps(soak.report(DOMAINS), allow_nan=False))
    tell_soak(tmp_path / "report", tmp_path)
    page = (tmp_path / "soak-layouts.md").read_text()
    assert "| switches of layout of engine-0, chosen | 2 |" in page
    assert "| switches of layout of engine-1, by hand | 1 |" in page
    assert "(soak-layouts.svg)" in page
    assert "</svg>" in (tmp_path / "soak-layouts.svg").read_text()


def filling(minutes: int, full_after: int, leak: float) -> Life:
    """A process that fills to 300 MiB, then leaks some MiB an hour. Looked at every five seconds."""
    looks = np.arange(0.0, minutes, 1 / 12)
    resident = (
        100 + 200 * np.minimum(1.0, looks / full_after) + leak * np.maximum(0.0, looks - full_after) / 60
    )
    return Life("engine-0", 9, (60.0 * looks).tolist(), (resident * MIB).astype(int).tolist())


@pytest.mark.parametrize(
    ("life", "grows"),
    [
        (filling(100, 12, 0.0), False),  # it was full after twelve minutes
        (filling(20, 18, 0.0), False),  # too short to be judged
        (filling(100, 12, 60.0), True),  # it leaks
        (filling(100, 90, 0.0), True),  # no cache fills for so long
    ],
)
def test_memory_is_judged_once_caches_may_be_full_also_of_what_was_reported_before(
    life: Life, grows: bool
) -> None:
    assert bool(growing([life])) == grows
    before = reported(["lost"]) | {"memory": [{"name": life.name, "pid": life.pid, **thinned(life)}]}
    before["failures"] = ["lost: lost", "memory: engine-0 (pid 9) grows by 99 MiB an hour"]
    after = rejudged(before)
    assert after["failures"][:1] == ["lost: lost"]
    assert bool(after["failures"][1:]) == grows
    assert after["superseded"] == ["memory: engine-0 (pid 9) grows by 99 MiB an hour"]
