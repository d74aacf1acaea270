"""Discovery is read from files and from etcd alike."""

import os
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.dynamo.stores import EXPIRED_SECONDS, EtcdStore, FileStore
from tests.web_server import served_web


def write(folder: Path, bucket: str, name: str, content: bytes, age: float = 0.0) -> Path:
    file = folder / "v1" / bucket / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    os.utime(file, (time.time() - age,) * 2)
    return file


async def test_records_are_read_with_the_time_of_their_renewal(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert await store.read() == {}
    write(tmp_path, "instances", "one", b"1", age=5)
    write(tmp_path, "mdc", "one", b"2")
    write(tmp_path, "other", "one", b"3")
    found = await store.read()
    assert {key: content for key, (_, content) in found.items()} == {"instances/one": b"1", "mdc/one": b"2"}
    assert found["mdc/one"][0] - found["instances/one"][0] == pytest.approx(5, abs=1)


async def test_a_changed_record_is_read_again_and_a_deleted_one_forgotten(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    file = write(tmp_path, "mdc", "one", b"old", age=5)
    assert (await store.read())["mdc/one"][1] == b"old"
    write(tmp_path, "mdc", "one", b"new", age=1)
    assert (await store.read())["mdc/one"][1] == b"new"
    file.unlink()
    assert await store.read() == {}


async def test_records_that_no_owner_renews_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "mdc", "one", b"left over", age=EXPIRED_SECONDS + 1)
    assert await FileStore(tmp_path).read() == {}


async def test_etcd_is_read_over_its_json_gateway() -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        pair = {"key": b64encode(b"v1/mdc/one").decode(), "value": b64encode(b"{}").decode(), "lease": "7"}
        return web.json_response({"header": {}, "kvs": [pair], "count": "1"})

    app = web.Application()
    app.router.add_post("/v3/kv/range", answer)
    async with served_web(app) as url:
        found = await EtcdStore(url).read()
    assert {key: content for key, (_, content) in found.items()} == {"v1/mdc/one": b"{}"}
    assert [b64decode(asked[0][name]) for name in ("key", "range_end")] == [b"v1/", b"v10"]


@pytest.mark.parametrize("status", [200, 503])
async def test_an_etcd_that_answers_nonsense_is_an_error(status: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="nonsense", status=status)

    app = web.Application()
    app.router.add_post("/v3/kv/range", answer)
    async with served_web(app) as url:
        with pytest.raises(OSError, match="etcd at"):
            await EtcdStore(url).read()


async def test_an_etcd_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="etcd at"):
        await EtcdStore("http://127.0.0.1:9", seconds=1).read()
