"""`roost plan`: a plan or a refusal in words, the memory curve, and a first placement from a recorded load,
with and without a fleet."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import Result

from bus import Message
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.cli.plan import in_bytes
from deploy.views import map_files
from deploy.views.first_placement import first_placement
from deploy.views.plan import PlanQuery, described, print_plan
from engine_adapter.initial_placement import initial
from engine_adapter.vllm.wire import map_digest
from fleet.experts import ModelShape
from fleet.facts.engines import EngineJoined
from fleet.placement import Placement
from fleet.requests.plans import DescribePlan, PlanDescribed
from migration.model.plan_record import Measures, MemoryPoint, PlanRecord, StepRecord
from tests.deploy import commands

pytestmark = pytest.mark.usefixtures("elsewhere")
SUBJECTS = Subjects()
NOW = Measures(
    balance_mean=0.61,
    balance_min=0.5,
    local_share=0.25,
    remote_ranks=2.5,
    remote_nodes=0.0,
    step_seconds=0.0042,
    expert_seconds=0.0012,
    dispatch_seconds=0.0003,
    memory_seconds=0.0,
)
THEN = msgspec.structs.replace(
    NOW, balance_mean=0.97, balance_min=0.93, local_share=0.31, step_seconds=0.0038
)
COPY = StepRecord(
    number=1,
    kind="replicate",
    layer=7,
    copies=1,
    bytes=44_000_000,
    gain_seconds=3e-5,
    what="expert 5 from rank 0 to rank 3",
    why="it is hot",
)
PLAIN: dict[str, Any] = {
    "engine": "a",
    "worker_id": "1",
    "model": "m",
    "epoch": 4,
    "policy": "roost",
    "tokens_per_second": 1234.5,
    "pairs": 20_000.0,
    "judged_pairs": 18_000.0,
    "next_window": True,
    "reasons": ("new shares: no bytes; it helps", "all anew: not needed"),
    "before": NOW,
}
PLAN = PlanRecord(
    **PLAIN,
    id="cafe",
    after=THEN,
    copies=1,
    copied_share=0.001,
    copied_bytes=44_000_000,
    handovers=2,
    gain_seconds=4e-4,
    gain_per_second=0.1,
    net_seconds=80.0,
    payback_seconds=2.5,
    transfer_seconds=0.2,
    balance_bound=0.999,
    step_ceiling=0.957,
    steps=(COPY, *(msgspec.structs.replace(COPY, layer=layer, gain_seconds=1e-6) for layer in range(30))),
    homes=((3, (1, 0)),),
    homes_note="two kinds of requests",
)


def roost(*arguments: str) -> Result:
    return commands.roost("plan", *arguments)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "load.npy"
    np.save(path, np.random.default_rng(3).pareto(1.0, (4, 32)) * 1000 + 1)
    return path


def test_a_plan_is_shown_with_what_it_changes_what_it_costs_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plan(PLAN)
    output = capsys.readouterr().out
    for words in (
        "plan cafe: 1 copy (0.1% of the slots, 44 MB) in 2 handovers of 0.20 s",
        "400 us shorter, which is 100.00 ms in each second of serving\npaid back after 2.5 s",
        "evaluated on the next window",
        "0.999 with even shares",
        "expert 5 from rank 0 to rank 3",
        "it is hot",
        "- all anew: not needed",
        "and 11 that gain less; --all prints them",
        "3: 1 0",
        "two kinds of requests",
        "dry run",
    ):
        assert words in output, (words, output)
    assert [line.split()[-2:] for line in output.splitlines() if line.startswith("served where")] == [
        ["25.0%", "31.0%"]
    ]
    print_plan(PLAN, everything=True)
    assert "gain less" not in capsys.readouterr().out


def test_how_far_predictions_are_trusted_is_shown_where_that_is_not_all_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plan(PLAN)
    assert "counts for" not in capsys.readouterr().out
    print_plan(msgspec.structs.replace(PLAN, plan_discount=0.35))
    assert (
        "predicted gains are multiplied by 35%, from the measured gains of earlier plans"
        in capsys.readouterr().out
    )


def test_a_refusal_is_shown_with_its_reasons_and_the_present_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plan(PlanRecord(**PLAIN, refused="no gain beyond sampling noise"))
    output = capsys.readouterr().out
    assert "nothing to do: no gain beyond sampling noise" in output
    assert "- new shares: no bytes; it helps" in output
    assert "0.610" in output
    print_plan(PlanRecord(**{**PLAIN, "before": None}, refused="insufficient data: 3 pairs per layer of 512"))
    assert "balance" not in capsys.readouterr().out


def test_the_memory_curve_and_lost_ranks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    point = MemoryPoint(
        slots_per_rank=9,
        redundant_slots=1,
        bytes_per_rank=2_550_000_000,
        kv_blocks=9000,
        balance=0.99,
        local_share=0.1,
        step_seconds=0.02,
        waiting_seconds=None,
        total_seconds=None,
        present=True,
        best=False,
    )
    lost = msgspec.structs.replace(
        PLAN,
        before=None,
        lost="2 experts of 1 layers have no live holder; all of them are loaded from storage",
        memory=(point,),
    )
    print_plan(lost)
    output = capsys.readouterr().out
    assert (
        "plan cafe: 1 copy (0.1% of the slots, 44 MB) in 2 handovers of 0.20 s together\n2 experts of 1"
        " layers" in output
    )
    assert "2.55 GB" in output
    assert "for ever" in output


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("0", 0), ("64KiB", 65536)],
)
def test_a_budget_is_read_with_its_unit(text: str, count: int) -> None:
    assert in_bytes(text) == count


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--budget", "2 parsecs"), "'2 parsecs': use a number and B, kB"),
        (("--policy", "best"), "no policy 'best'; there are: roost"),
        (("--dead", "3;5"), "name ranks by their numbers"),
        (("--ranks", "4"), "--ranks belongs to --profile"),
        (("--profile", "{profile}"), "--profile needs --ranks"),
        (("--profile", "{profile}", "--ranks", "4", "--apply"), "--apply is about a running engine"),
        (("--profile", "{profile}", "--ranks", "4", "--memory"), "--memory is about a running engine"),
        (("a", "--profile", "{profile}", "--ranks", "4"), "ENGINE is about a running engine"),
        (
            ("--profile", "{profile}", "--ranks", "4", "--slots-per-rank", "7"),
            "32 experts do not fit into 7 slots",
        ),
        (("--profile", "{profile}", "--ranks", "4", "--nodes", "3"), "4 ranks do not divide by 3 nodes"),
        (("--profile", "{profile}", "--ranks", "4", "--format", "trt"), "no format 'trt'; there are: vllm"),
        (
            ("--profile", "{profile}", "--ranks", "4", "--format", "vllm", "--dense-layers", "1"),
            "belongs to --format sglang",
        ),
        (("--format", "vllm"), "--format belongs to --profile"),
        (("--profile", "nowhere.npy", "--ranks", "4"), "nowhere.npy"),
        (("--profile", "{profile}", "--ranks", "4", "--out", "no/such/folder/x.json"), "cannot write"),
    ],
)
def test_what_cannot_work_is_refused_in_words(
    profile: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    result = roost(*(argument.format(profile=profile) for argument in arguments))
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_first_placement_is_written_for_an_engine_that_begins_with_it(
    profile: Path, tmp_path: Path
) -> None:
    out = tmp_path / "placement.json"
    result = roost(
        "--profile", str(profile), "--ranks", "4", "--slots-per-rank", "10", "--nodes", "2", "--out", str(out)
    )
    assert result.exit_code == 0
    assert "8 redundant per layer" in result.stdout
    assert f'placement = "{out}"' in result.stderr
    placement = initial(out, layers=4, experts=32, ranks=4, slots_per_rank=None)
    assert placement == first_placement(np.load(profile), 4, 10, 2)
    found = json.loads(
        roost("--profile", str(profile), "--ranks", "4", "--slots-per-rank", "10", "--json").stdout
    )
    assert found["placed"]["mean"] > found["in_order"]["mean"]
    assert found["placed"]["mean"] <= found["bound"]["mean"] + 1e-9


def first(profile: Path, out: Path, *arguments: str) -> Result:
    return roost(
        "--profile", str(profile), "--ranks", "2", "--slots-per-rank", "20", "--out", str(out), *arguments
    )


def test_a_map_for_sglang_has_every_slot_filled_and_a_row_for_every_layer(
    profile: Path, tmp_path: Path
) -> None:
    out = tmp_path / "map.json"
    result = first(profile, out, "--format", "sglang", "--dense-layers", "1")
    assert result.exit_code == 0, result.output
    assert f"--init-expert-location {out} --ep-num-redundant-experts 8" in result.stderr
    table = np.array(json.loads(out.read_bytes())["physical_to_logical_map"])
    assert table.shape == (5, 40)
    assert (table[0] == np.arange(40) % 32).all()
    found = Placement(table[1:], experts=32, ranks=2)
    assert (found.expert_of_slot >= 0).all()


def test_a_map_for_vllm_carries_its_digest_and_is_read_back(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    result = first(profile, out, "--format", "vllm")
    assert result.exit_code == 0, result.output
    assert f"roost migrate --map {out} --to ENGINE" in result.stderr
    placement = map_files.read(out)
    assert json.loads(out.read_bytes())["digest"] == map_digest(placement.expert_of_slot, 32)
    assert (placement.expert_of_slot >= 0).all()
    out.write_bytes(
        out.read_bytes().replace(b'"physical_to_logical_map":[[', b'"physical_to_logical_map":[[9,', 1)
    )
    with pytest.raises(ValueError, match="no map can be read"):
        map_files.read(out)


def test_a_map_that_was_changed_by_hand_does_not_match_its_digest(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    first(profile, out, "--format", "vllm")
    known = json.loads(out.read_bytes())
    row = known["physical_to_logical_map"][0]
    row[0], row[1] = row[1], row[0]
    out.write_text(json.dumps(known))
    with pytest.raises(ValueError, match="does not match its digest"):
        map_files.read(out)


# With a fleet


async def joined(bus: MemoryBus, engine: str = "a") -> None:
    shape = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=8)
    about: dict[str, Any] = {
        "model": "m",
        "node": "n",
        "urls": ("http://x",),
        "block_size": 16,
        "kv_blocks": 8,
        "max_context": 512,
        "max_batch_tokens": 256,
    }
    await bus.record(
        SUBJECTS.membership(engine),
        EngineJoined(engine=engine, worker_id=hash(engine) % 99, shape=shape, **about),
    )


async def test_the_planner_is_asked_about_the_only_engine_with_experts() -> None:
    bus, received = MemoryBus(), list[Message]()
    await joined(bus)

    async def planner(message: Message) -> Message:
        received.append(message)
        return PlanDescribed(engine="a", worker_id=1, record=msgspec.json.encode(PLAN))

    async with bus.serve(SUBJECTS.describe_plan, planner):
        answer = await described(bus, SUBJECTS, PlanQuery(None, "uniform", 5, True, (1,), (0,)))
        assert msgspec.json.decode(answer.record, type=PlanRecord) == PLAN
        assert received == [
            DescribePlan(engine="a", policy="uniform", budget_bytes=5, memory=True, dead=(1,), layers=(0,))
        ]
        await joined(bus, "b")
        with pytest.raises(typer.Exit):
            await described(bus, SUBJECTS, PlanQuery())
        await described(bus, SUBJECTS, PlanQuery("b"))


def test_a_fleet_without_engines_is_said_as_such(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_BUS_NAMESPACE", "plan-test")
    monkeypatch.setattr("deploy.views.plan.ASK_SECONDS", 0.2)
    nothing = roost("--nats", nats_url)
    assert (nothing.exit_code, "no engine with experts has joined" in nothing.stderr) == (2, True)
