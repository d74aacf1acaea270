"""The agent of a fake SGLang: what it finds out, and what it follows: KV events, load, ranks and recorder."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deploy.parts.sglang import read_counts
from deploy.process import alongside, first_of
from engine_adapter.engine import EngineFailed, RankFacts
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.sglang.deployment import RanksChanged, SglangDeployment
from engine_adapter.sglang.discovery import FoundServer, discover
from engine_adapter.sglang.load import rank_load
from engine_adapter.sglang.recorder import split
from engine_adapter.sglang.server import RankReading, SglangServer
from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from tests.engine_adapter.foreign.test_kv_blocks import Mirror
from tests.engine_adapter.sglang.fake_server import (
    CONFIG,
    EXPERTS,
    FOLDER,
    LAYERS,
    PAGE,
    PAGES,
    TOP_K,
    FakeSglang,
    continued,
    fake_sglang,
)
from tests.engine_adapter.sglang.test_rank import PROMPT, answered, deployed, made


@pytest.fixture
async def server() -> AsyncIterator[FakeSglang]:
    async with fake_sglang() as one:
        yield one


async def found(server: FakeSglang, **about: Any) -> FoundServer:
    config = SglangConfig(url=server.url, **about)
    return await discover(config, SglangServer(config.base, None, 5))


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110 polled on purpose: servers have no event
            await asyncio.sleep(0.005)


# Discovery


async def test_it_finds_model_ranks_sizes_and_sources(server: FakeSglang) -> None:
    one = await found(server)
    assert (one.model, one.max_context, one.max_batch_tokens) == ("small", 256, 256)
    assert (one.block_size, one.kv_blocks, one.ranks) == (PAGE, PAGES, (0, 1))
    ports = [publisher.port for publisher in server.publishers]
    assert [source.endpoint for source in one.kv] == [f"tcp://127.0.0.1:{port}" for port in ports]
    assert one.kv[1].replay_endpoint == f"tcp://127.0.0.1:{server.publishers[1].replay_port}"
    assert one.experts is not None
    assert (one.experts.shape.layers, one.experts.shape.experts) == (LAYERS, EXPERTS)


async def test_a_wildcard_of_the_publisher_is_the_host_of_the_url(server: FakeSglang) -> None:
    server.info["kv_events"]["endpoint_host"] = "*"
    one = await found(server)
    assert one.kv[0].endpoint == f"tcp://127.0.0.1:{server.publishers[0].port}"
    assert not one.kv[0].may_connect


async def test_configured_sources_go_before_those_of_the_server(server: FakeSglang) -> None:
    one = await found(server, kv_endpoint="tcp://*:7000", kv_replay_endpoint="tcp://*:7100")
    assert [source.endpoint for source in one.kv] == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]
    assert one.kv[1].replay_endpoint == "tcp://127.0.0.1:7101"


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"kv_events": None}, "it publishes no KV events"),
        ({"kv_events": None, "page_size": 1}, "it publishes no KV events"),
        ({"speculative_algorithm": "EAGLE"}, "with EAGLE its KV events name pairs of tokens"),
    ],
)
async def test_blocks_that_cannot_be_followed_are_not(
    server: FakeSglang, caplog: pytest.LogCaptureFixture, about: dict[str, Any], reason: str
) -> None:
    server.info |= about
    assert (await found(server)).kv == ()
    assert reason in caplog.text


async def test_small_pages_are_guessed_in_blocks(
    server: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    server.info["kv_events"]["block_size"] = 1
    one = await found(server)
    assert (one.kv, one.block_size, one.kv_blocks) == ((), PAGE, PAGES)
    assert "its pages have only 1 tokens; start SGLang with --page-size 16" in caplog.text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda server: setattr(server, "up", False), "HTTP 503; is this a SGLang server"),
        (lambda server: server.info.update(disaggregation_mode="prefill"), "prefill of a disaggregated pair"),
        (lambda server: server.info.update(tokenizer_path="/no/such"), "--tokenizer DIR"),
        (lambda server: server.info.pop("model_path"), "/server_info is not SGLang's"),
        (lambda server: server.caches.clear(), "/v1/loads names no rank"),
    ],
)
async def test_what_cannot_be_represented_is_said(
    server: FakeSglang, change: Callable[[FakeSglang], None], error: str
) -> None:
    change(server)
    with pytest.raises(EngineFailed, match=error):
        await found(server)


# KV events and load


class Facts:
    """All that a rank has reported."""

    def __init__(self, rank: Any) -> None:
        self.rank, self.mirror = rank, Mirror()
        self.last: RankFacts | None = None

    def take(self) -> RankFacts:
        self.last = facts = self.rank.take_facts()
        self.mirror.apply(list(facts.kv))
        return facts

    @property
    def blocks(self) -> set[int]:
        self.take()
        return set(self.mirror.blocks)


def hashed(prompt: list[int], salt: str = "") -> set[int]:
    ids = [*prompt, *continued(prompt, 12)[:-1]]
    return set(sequence_hashes(local_hashes(ids, PAGE, salted_seed(salt))))


async def test_cached_blocks_are_known_under_the_hashes_of_routers(server: FakeSglang) -> None:
    async with deployed(server) as deployment:
        facts = [Facts(rank) for rank in deployment.ranks]
        await answered(deployment.ranks[0])
        await answered(deployment.ranks[0], salt="ours")
        await answered(deployment.ranks[1], prompt=PROMPT[::-1])
        await until(lambda: facts[0].blocks == hashed(PROMPT) | hashed(PROMPT, "ours"))
        await until(lambda: facts[1].blocks == hashed(PROMPT[::-1]))
        server.caches[0].clear()
        await server.publish(0)
        await until(lambda: not facts[0].blocks)


async def test_evicted_blocks_are_forgotten(server: FakeSglang) -> None:
    async with deployed(server) as deployment:
        facts = Facts(deployment.ranks[0])
        for number in range(30):
            await answered(deployment.ranks[0], prompt=[number + 1, *PROMPT])
        await until(lambda: facts.blocks >= hashed([30, *PROMPT]))
        assert len(facts.blocks) == len(server.caches[0].parent) == PAGES
        assert not facts.blocks & hashed([1, *PROMPT])


async def test_blocks_that_were_cached_before_the_agent_came_are_found_by_replay(server: FakeSglang) -> None:
    async with deployed(server) as deployment:
        await answered(deployment.ranks[0])
    async with deployed(server) as deployment:
        facts = Facts(deployment.ranks[0])
        await until(lambda: facts.blocks == hashed(PROMPT))


async def test_load_is_that_of_the_rank(server: FakeSglang) -> None:
    server.hold.clear()
    async with deployed(server) as deployment:
        facts = [Facts(rank) for rank in deployment.ranks]
        tasks = [asyncio.create_task(answered(deployment.ranks[1])) for _ in range(3)]
        await until(lambda: facts[1].take().load.running == 3)
        assert facts[1].last is not None
        load = facts[1].last.load
        assert (load.prefill_tokens, load.decode_blocks, load.used_blocks) == (40, 9, 9)
        assert facts[0].take().load.running == 0
        server.hold.set()
        await asyncio.gather(*tasks)
        await until(lambda: facts[1].take().load.running == 0)
        await until(lambda: facts[1].take().load.used_blocks == len(facts[1].blocks))
        reading = facts[1].take().load.reading
        await until(lambda: facts[1].take().load.reading > reading)


def test_the_time_of_a_step_is_that_of_the_steps_between_two_readings() -> None:
    def read(moments: list[float] | None) -> RankReading:
        return RankReading(0, 1, 0, decode_moments=None if moments is None else tuple(moments))

    def seconds(now: list[float] | None, before: list[float] | None) -> float | None:
        about: dict[str, Any] = {"block_size": 16, "kv_blocks": 8, "cached_blocks": 0}
        return rank_load(read(now), read(before), **about).step_seconds

    assert seconds([14, 0, 30_000, 0, 0, 0], [4, 0, 10_000, 0, 0, 0]) == pytest.approx(0.002)
    assert seconds([4, 0, 10_000], None) == pytest.approx(0.0025)
    assert seconds(None, None) is None
    assert seconds([4, 0, 10_000], [4, 0, 10_000]) is None
    assert seconds([1, 0, 10], [4, 0, 10_000]) is None, "it has started anew"
    assert seconds([1.0], [1.0]) is None


async def test_a_server_that_stays_away_is_gone(server: FakeSglang) -> None:
    run = asyncio.create_task((await made(server, misses=2)).run())
    await until(lambda: server.readings > 2)
    server.up = False
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(run, 5)
    assert "HTTP 503" in str(first_of(caught.value, (EngineFailed,)))


async def test_ranks_that_elastic_parallelism_adds_end_this_incarnation(
    server: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.info["elastic_ep_backend"] = "nixl"
    server.scaling = {"is_scaling_elastic_ep": False, "effective_ep_size": 2, "scale_phase": None}
    run = asyncio.create_task((await made(server)).run())
    about = {"effective_ep_size": 2, "pending_ep_size": 3, "scale_phase": "preparing", "last_error": None}
    server.scaling = {"is_scaling_elastic_ep": True, **about}
    await until(lambda: "phase preparing, 2 ranks, 3 pending" in caplog.text)
    server.caches.append(server.caches[0])
    server.running.append(0)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(run, 5)
    assert isinstance(first_of(caught.value, (RanksChanged,)), RanksChanged)


# Recorder


async def recording(server: FakeSglang, folder: Path, **about: Any) -> SglangDeployment:
    server.recorder_folder = folder
    server.info["expert_distribution_recorder_mode"] = "stat"
    fast: dict[str, Any] = {"recorder_seconds": 0.02, "routed_share": 0.0}
    config = SglangConfig(url=server.url, recorder_folder=str(folder), **fast | about)
    client = SglangServer(config.base, None, 5)
    return SglangDeployment(await discover(config, client), config, client, None, read_counts)


async def test_what_the_recorder_counts_is_the_demand_of_all_ranks(
    server: FakeSglang, tmp_path: Path
) -> None:
    deployment = await recording(server, tmp_path)
    assert deployment.ranks[0].description.capabilities.experts
    async with alongside(deployment.run(), "under test"):
        taken: list[RankFacts] = []

        def demand() -> bool:
            taken.append(deployment.ranks[1].take_facts())
            return taken[-1].activations is not None

        await until(demand)
    activations = taken[-1].activations
    assert activations is not None
    counts = activations.counts
    assert counts.shape == (LAYERS, EXPERTS)
    assert set(np.unique(counts)) <= {1, 2}, "three steps with one pair per expert, over two ranks"
    assert activations.tokens == EXPERTS // TOP_K
    assert server.posted[:2] == ["/start_expert_distribution_record", "/dump_expert_distribution_record"]
    assert len(os.listdir(tmp_path)) <= 1, "files that were written for the agent are removed"


async def test_demand_is_not_counted_twice(server: FakeSglang, tmp_path: Path) -> None:
    """The recorder counts all requests, also those that are asked for their experts."""
    deployment = await recording(server, tmp_path, routed_share=1.0, recorder_seconds=60.0)
    async with alongside(deployment.run(), "under test"):
        await answered(deployment.ranks[0])
        facts = deployment.ranks[0].take_facts()
    assert len(facts.ended) == 1
    assert facts.activations is None


async def test_where_eplb_uses_the_recorder_the_agent_only_reads(server: FakeSglang, tmp_path: Path) -> None:
    server.info["enable_eplb"] = True
    deployment = await recording(server, tmp_path)
    async with alongside(deployment.run(), "under test"):
        await asyncio.sleep(0.05)
        file = await asyncio.to_thread(server.write_record, 1)
        await until(lambda: deployment.ranks[0].take_facts().activations is not None)
    assert server.posted == []
    assert file.exists()


async def test_a_file_that_is_none_is_left_alone(
    server: FakeSglang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.info["enable_eplb"] = True
    deployment = await recording(server, tmp_path)
    async with alongside(deployment.run(), "under test"):
        await until(lambda: server.readings > 1)
        (tmp_path / "expert_distribution_recorder_7.pt").write_bytes(b"PK\x03\x04 and no more")
        await until(lambda: "nothing is learnt from it" in caplog.text)
    assert (tmp_path / "expert_distribution_recorder_7.pt").exists()


@pytest.mark.parametrize("mode", [None, "per_pass", "per_token"])
async def test_without_counts_of_all_ranks_the_recorder_is_not_used(
    server: FakeSglang, tmp_path: Path, mode: str | None
) -> None:
    deployment = await recording(server, tmp_path)
    server.info["expert_distribution_recorder_mode"] = mode
    deployment = SglangDeployment(
        await found(server),
        SglangConfig(url=server.url, recorder_folder=str(tmp_path), routed_share=0.0),
        SglangServer(server.url, None, 5),
        None,
        read_counts,
    )
    assert not deployment.ranks[0].description.capabilities.experts


def test_counts_are_split_without_a_rest() -> None:
    counts = np.arange(12, dtype=np.int64).reshape(2, 6)
    parts = split(counts, 4, 2)
    assert (sum(part.counts for part in parts) == counts).all()
    assert max(part.counts.max() for part in parts) == 3


# Settings


def test_settings_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="kv_replay_endpoint needs kv_endpoint"):
        SglangConfig(kv_replay_endpoint="tcp://*:1")
    with pytest.raises(ValueError, match="must start with http"):
        SglangConfig(url="sglang:30000")
    with pytest.raises(ValueError, match="routed_share"):
        SglangConfig(routed_share=1.5)
    with pytest.raises(ValueError, match="url is not set"):
        _ = SglangConfig().base
    assert SglangConfig(url="http://a:1/v1/").base == "http://a:1"


def test_a_model_whose_config_says_nothing_has_no_experts(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    dense = {key: value for key, value in CONFIG.items() if "expert" not in key}
    (tmp_path / "config.json").write_text(json.dumps(dense))

    async def ask() -> FoundServer:
        async with fake_sglang(kv=False) as server:
            return await found(server, tokenizer=str(tmp_path))

    assert asyncio.run(ask()).experts is None
    assert msgspec.json.decode((tmp_path / "config.json").read_bytes())
