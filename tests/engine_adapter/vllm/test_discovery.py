"""What an agent finds out about a recorded vLLM."""

import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.kv_source import connectable, shifted
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.discovery import Deployment, discover
from engine_adapter.vllm.server import VllmServer
from fleet.facts.engines import ServedModel
from tests.engine_adapter.vllm.recorded_server import RecordedVllm, recorded_vllm


async def found(server: RecordedVllm, **about: object) -> Deployment:
    config = VllmConfig(urls=(server.url,), **about)  # type: ignore[arg-type]
    return await discover(config, [VllmServer(base, None, 5) for base in config.bases])


async def test_ranks_blocks_context_and_event_sources_are_found() -> None:
    async with recorded_vllm() as server:
        deployment = await found(server)
        ports = {rank: (one.port, one.replay_port) for rank, one in server.publishers.items()}
    assert (deployment.version, deployment.model, deployment.max_context) == ("0.32.0", "small", 512)
    assert (deployment.block_size, [one.kv_blocks for one in deployment.targets]) == (32, [24, 24])
    assert deployment.shares_url
    for rank, target in enumerate(deployment.targets):
        assert target.rank == rank
        assert target.kv is not None
        assert target.kv.endpoint == f"tcp://127.0.0.1:{ports[rank][0]}"
        assert target.kv.replay_endpoint == f"tcp://127.0.0.1:{ports[rank][1]}"


async def test_one_url_per_rank() -> None:
    async with recorded_vllm() as first, recorded_vllm() as second:
        for number, server in enumerate((first, second)):
            server.metrics = "".join(
                f"{line}\n" for line in server.metrics.splitlines() if f'engine="{1 - number}"' not in line
            )
        config = VllmConfig(urls=(first.url, f"{second.url}/v1/"))
        deployment = await discover(config, [VllmServer(base, None, 5) for base in config.bases])
    assert [one.server.base for one in deployment.targets] == [first.url, second.url]
    assert [one.rank for one in deployment.targets] == [0, 1]
    assert not deployment.shares_url


async def test_a_url_per_rank_that_serves_all_ranks_is_refused() -> None:
    async with recorded_vllm() as first, recorded_vllm() as second:
        config = VllmConfig(urls=(first.url, second.url))
        with pytest.raises(EngineFailed, match="serves 2 ranks"):
            await discover(config, [VllmServer(base, None, 5) for base in config.bases])


async def test_servers_of_other_models_are_not_one_deployment() -> None:
    async with recorded_vllm() as first, recorded_vllm() as second:
        for server in (first, second):
            server.metrics = "".join(
                f"{line}\n" for line in server.metrics.splitlines() if 'engine="1"' not in line
            )
        second.models["data"][0]["id"] = "other"
        config = VllmConfig(urls=(first.url, second.url))
        with pytest.raises(EngineFailed, match="do not serve the same models"):
            await discover(config, [VllmServer(base, None, 5) for base in config.bases])


async def test_the_tokenizer_is_in_the_models_folder_or_in_another(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    async with recorded_vllm() as server:
        assert (await found(server)).tokenizer is None
        named = (await found(server, tokenizer=str(tmp_path))).tokenizer
        server.models["data"][0]["root"] = str(tmp_path)
        own = (await found(server)).tokenizer
        with pytest.raises(EngineFailed, match=r"there is no tokenizer\.json"):
            await found(server, tokenizer=str(tmp_path / "none"))
    assert named == own is not None
    assert sorted(zipfile.ZipFile(BytesIO(own)).namelist()) == ["chat_template.jinja", "tokenizer.json"]


async def test_adapters_are_served_models_and_the_base_is_chosen() -> None:
    async with recorded_vllm() as server:
        server.models["data"].insert(0, {"id": "lora", "parent": "small", "max_model_len": None})
        deployment = await found(server)
        with pytest.raises(EngineFailed, match="does not serve 'lora'"):
            await found(server, model="lora")
    assert deployment.model == "small"
    assert deployment.models == (
        ServedModel(name="lora", max_context=512, adapter=True),
        ServedModel(name="small", max_context=512),
    )


async def test_a_version_without_event_sources_takes_them_from_the_settings() -> None:
    async with recorded_vllm() as server:
        server.sources = None
        assert [one.kv for one in (await found(server)).targets] == [None, None]
        deployment = await found(server, kv_endpoint="tcp://*:5557", kv_replay_endpoint="tcp://10.0.0.1:6000")
    sources = [one.kv for one in deployment.targets]
    assert [(one and one.endpoint, one and one.replay_endpoint) for one in sources] == [
        ("tcp://127.0.0.1:5557", "tcp://10.0.0.1:6000"),
        ("tcp://127.0.0.1:5558", "tcp://10.0.0.1:6001"),
    ]


async def test_events_that_are_not_published_over_zmq_are_none() -> None:
    async with recorded_vllm() as server:
        assert server.sources is not None
        server.sources["0"]["publisher"] = "null"
        server.sources["1"]["enable_kv_cache_events"] = False
        assert [one.kv for one in (await found(server)).targets] == [None, None]


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ("", "names no rank"),
        ('vllm:num_requests_running{engine="0"} 0.0\n', "does not tell one block size"),
        ("vllm:broken", "is not vLLM's"),
    ],
)
async def test_a_server_that_is_no_vllm_says_so(metrics: str, says: str) -> None:
    async with recorded_vllm() as server:
        server.metrics = metrics
        with pytest.raises(EngineFailed, match=says):
            await found(server)


async def test_a_dead_server_says_so() -> None:
    async with recorded_vllm() as server:
        server.up = False
        with pytest.raises(EngineFailed, match="answers HTTP 503; is this a vLLM server"):
            await found(server)
    with pytest.raises(EngineFailed, match="does not answer"):
        await found(server)


def test_endpoints_of_publishers_that_bind_every_address() -> None:
    assert connectable("tcp://*:1", "http://gpu7:8000") == "tcp://gpu7:1"
    assert connectable("tcp://[::]:1", "http://[fe80::1]:8000") == "tcp://[fe80::1]:1"
    assert connectable("tcp://0.0.0.0:1", "http://gpu7") == "tcp://gpu7:1"
    assert connectable("tcp://10.0.0.3:1", "http://gpu7") == "tcp://10.0.0.3:1"
    assert connectable("ipc:///tmp/kv", "http://gpu7") == "ipc:///tmp/kv"
    assert [shifted("tcp://*:5557", 3), shifted("ipc:///tmp/kv:1", 3)] == ["tcp://*:5560", "ipc:///tmp/kv:1"]


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"urls": ("server:80",)}, "must start with http://"),
        ({"urls": ("http://me:secret@a",)}, "names a user"),
        ({"urls": ("http://a/v1", "http://a")}, "names a server twice"),
        ({"kv_replay_endpoint": "tcp://a:1"}, "needs kv_endpoint"),
        ({"listen": "7077"}, "must be HOST:PORT"),
        ({"listen": "a:b"}, "must be HOST:PORT"),
        ({"load_seconds": 0.0}, "load_seconds"),
    ],
)
def test_bad_settings_are_refused(about: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VllmConfig(**about)  # type: ignore[arg-type]
