"""`roost popularity`: the tracker's knowledge and other systems' files, in words, as JSON and as pictures."""

import asyncio
import builtins
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import Result

from bus import BusError
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.views.popularity import as_record, demands, describe, learn, loaded, print_popularity, skew
from fleet.experts import ModelShape
from fleet.facts.activity import ExpertsActivated
from fleet.facts.engines import EngineJoined
from fleet.popularity import ExpertCounts, ExpertTable
from fleet.requests.demand import ClusterPopularity, PopularityDescribed, RankPopularity, SourceQuality
from tests.deploy import commands
from tracker.config import TrackerConfig
from tracker.service import TrackerService

pytestmark = pytest.mark.usefixtures("elsewhere")
SUBJECTS = Subjects()
SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=4, expert_intermediate=8)
CHANCE = np.random.default_rng(0)
COUNTS = CHANCE.integers(1, 200, (3, 8))


def roost(*arguments: str) -> Result:
    return commands.roost("popularity", *arguments)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "load.npy"
    np.save(path, COUNTS)
    return path


def described(**fields: Any) -> PopularityDescribed:
    profile = ExpertTable.of(COUNTS / COUNTS.sum(axis=1, keepdims=True))
    plain: dict[str, Any] = {
        "model": "m",
        "tokens": 1234.0,
        "tokens_per_second": 56.0,
        "fast": profile,
        "slow": profile,
        "ranks": (
            RankPopularity(
                engine="a",
                rank=0,
                tokens_per_second=56.0,
                remote=0.25,
                wanted_remote=((1, 7, 3.5),),
                local_idle=((0, 2, 0.1),),
            ),
        ),
        "clusters": (
            ClusterPopularity(cluster=0, share=0.75, distance=0.01),
            ClusterPopularity(cluster=3, share=0.25, distance=0.2),
        ),
        "shifted": False,
        "divergence": 0.001,
        "threshold": 0.004,
        "sources": (SourceQuality(source="tokens", requests=12, trust=0.5, reliability=0.4),),
        "gain": 0.8,
        "outcomes": 99,
        "recall": 0.91,
        "prior_recall": 0.72,
        "stored_blocks": 10,
        "stored_bytes": 220,
    }
    return PopularityDescribed(**{**plain, **fields})


def test_skew_is_that_of_the_definitions() -> None:
    even, lonely = np.full(8, 0.125), np.eye(8)[5]
    first, second, third = skew(np.stack([even, lonely, np.zeros(8)]))
    assert (first.max_over_mean, first.entropy, first.top_tenth) == pytest.approx((1.0, 1.0, 0.125))
    assert (second.max_over_mean, second.entropy, second.top_tenth) == pytest.approx((8.0, 0.0, 1.0))
    assert second.hottest[0] == (5, 1.0)
    assert third.entropy == pytest.approx(1.0)
    (some,) = skew(COUNTS[:1])
    shares = COUNTS[0] / COUNTS[0].sum()
    assert some.entropy == pytest.approx(-sum(share * math.log(share) for share in shares) / math.log(8))
    assert [expert for expert, _ in some.hottest[:2]] == np.argsort(-shares)[:2].tolist()


def test_everything_the_tracker_knows_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_popularity(described())
    said = capsys.readouterr().out
    for words in (
        "1,234 tokens",
        "56.0 tokens/s",
        "no shift",
        "max/mean",
        "a/0",
        "25.0%",
        "1/7 3.5",
        "0/2 0.1",
        "75.0%",
        "gain 0.80",
        "0.910",
        "0.720",
        "220 bytes",
    ):
        assert words in said, said


def test_little_evidence_is_said_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    print_popularity(
        described(
            ranks=(),
            clusters=(),
            sources=(),
            divergence=None,
            threshold=None,
            recall=None,
            prior_recall=None,
            shifted=True,
        )
    )
    said = capsys.readouterr().out
    for words in ("too little was seen", "shifted", "no rank has reported", "no clusters yet"):
        assert words in said, said


def test_programs_get_skew_instead_of_tables() -> None:
    record = as_record(described())
    assert len(record["layers"]) == len(record["recent"]) == 3
    assert "slow" not in record
    assert record["gain"] == 0.8


def test_a_file_is_shown_without_any_fleet(dump: Path) -> None:
    result = roost("--from", str(dump))
    assert result.exit_code == 0
    assert "3 layers x 8 experts" in result.output
    shown = json.loads(roost("--from", str(dump), "--json").output)
    assert (shown["layers"], shown["experts"], shown["whole"]) == (3, 8, True)
    assert shown["skew"][0]["hottest"][0][0] == int(np.argmax(COUNTS[0]))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_heat_maps_are_drawn(dump: Path, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"out.{ending}"
    assert roost("--from", str(dump), "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_without_matplotlib_the_remedy_is_named(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def no_drawing(name: str, *rest: Any) -> Any:
        if name == "deploy.terminal.heatmaps":
            raise ImportError("No module named 'matplotlib'")
        return true_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_drawing)
    result = roost("--from", str(dump), "--plot", "out.png")
    assert result.exit_code == 2
    assert "pip install 'roost[plot]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", "nowhere.npy"), "nowhere.npy"),
        (("--from", "{dump}", "--learn", "{dump}"), "use one of them"),
        (("--learn", "{dump}"), "--learn needs --model"),
        (("--learn", "{dump}", "--model", "m", "--plot", "a.png"), "draws nothing"),
        (("--top-k", "2"), "--learn"),
        (("--from", "{dump}", "--plot", "out.nonsense"), "cannot draw out.nonsense"),
        (("--from", "{dump}", "--plot", "no/such/folder/out.png"), "cannot draw"),
    ],
)
def test_what_cannot_work_is_refused_in_words(dump: Path, arguments: tuple[str, ...], said: str) -> None:
    result = roost(*(argument.format(dump=dump) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_fleet_without_engines_or_without_a_tracker_is_said_as_such(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOST_BUS_NAMESPACE", "popularity-test")
    monkeypatch.setattr("deploy.views.popularity.ASK_SECONDS", 0.2)
    nothing = roost("--nats", nats_url)
    assert (nothing.exit_code, "no engine has joined" in nothing.stderr) == (2, True)
    silent = roost("--nats", nats_url, "--model", "m")
    assert silent.exit_code == 1
    assert "roost up" in silent.stderr


# With a tracker


def joined(engine: str = "a", model: str = "m") -> EngineJoined:
    urls = ("http://x", "http://y")
    return EngineJoined(
        engine=engine,
        worker_id=hash(engine) % 1000,
        model=model,
        node="n",
        urls=urls,
        block_size=16,
        kv_blocks=8,
        max_context=512,
        max_batch_tokens=256,
        shape=SHAPE,
    )


@asynccontextmanager
async def tracking(bus: MemoryBus) -> AsyncIterator[TrackerService]:
    service = TrackerService(
        bus, SUBJECTS, TrackerConfig(publish_seconds=0.2), clock=asyncio.get_running_loop().time
    )
    running = asyncio.create_task(service.run())
    try:
        await asyncio.wait_for(service.ready.wait(), 5)
        yield service
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=5)


async def test_a_running_tracker_is_asked_about_the_only_model(dump: Path) -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with tracking(bus):
        counts = ExpertCounts.of(COUNTS)
        tokens = int(COUNTS.sum(axis=1).max() // 2) + 1
        report = ExpertsActivated(
            engine="a",
            worker_id=joined().worker_id,
            rank=1,
            model="m",
            epoch=0,
            seconds=1.0,
            tokens=tokens,
            cached_tokens=0,
            counts=counts,
        )
        async with bus.subscribe(SUBJECTS.profiles) as profiles:
            await bus.publisher(SUBJECTS.experts("a")).publish(report)
            await asyncio.wait_for(anext(aiter(profiles)), 10)
        answer = await describe(bus, SUBJECTS, None)
        assert answer.model == "m"
        found = await demands(bus, SUBJECTS, answer)
        assert found.keys() == {("a", 1)}
        assert np.argmax(found["a", 1][0]) == np.argmax(COUNTS[0])
        print_popularity(answer)


async def test_a_file_is_learnt_once_and_only_where_it_fits(dump: Path, tmp_path: Path) -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    load, digest = loaded(dump)
    async with tracking(bus):
        said, before, after = await learn(bus, SUBJECTS, load, digest, "m", None, None)
        assert (said.tokens, before) == (round(COUNTS.sum(axis=1).max() / 2), 0.0)
        assert after == pytest.approx(said.tokens, rel=0.02)
        profile = (await describe(bus, SUBJECTS, "m")).slow.array()
        assert np.argmax(profile, axis=1).tolist() == np.argmax(COUNTS, axis=1).tolist()
        _, before, after = await learn(bus, SUBJECTS, load, digest, "m", None, None)
        assert after <= before
        np.save(tmp_path / "other.npy", COUNTS[:, :4])
        with pytest.raises(typer.Exit):
            await learn(bus, SUBJECTS, *loaded(tmp_path / "other.npy"), "m", None, None)
        with pytest.raises(BusError, match="'other'"):
            await learn(bus, SUBJECTS, load, digest, "other", None, None)


async def test_several_models_must_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    await bus.record(SUBJECTS.membership("b"), joined("b", "other"))
    with pytest.raises(typer.Exit):
        await describe(bus, SUBJECTS, None)
    assert "--model; served are: m, other" in capsys.readouterr().err
