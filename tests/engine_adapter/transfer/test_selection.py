"""Which ways a rank takes, the variant of NIXL, and shared memory within one process."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.nixl_loader import NixlMissing, agent_name, load_nixl
from engine_adapter.transfer.port import AddressRefused, PeerGone, Pull, TransferError
from engine_adapter.transfer.selection import open_transfers
from engine_adapter.transfer.shared_memory import SharedTransfer, this_host

TENSORS = laid_out([("weights", "float32", (64, 16)), ("scales", "float32", (3,))])
CELL_BYTES = 8192


def whole(source: int, cell: int) -> Pull:
    return Pull(source, 0, cell, 0, CELL_BYTES)


VARIANTS = ("nixl_cu12", "nixl_cu13", "nixl")


@pytest.fixture
def memory() -> Iterator[MappedCells]:
    memory = MappedCells(TENSORS, 3)
    yield memory
    memory.close()


@pytest.fixture
def no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in VARIANTS:
        monkeypatch.setitem(sys.modules, f"{variant}._api", None)
        monkeypatch.delitem(sys.modules, variant, raising=False)


def pretended(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """A variant that consists of what is looked for."""
    bindings = ModuleType("_bindings")
    for name in ("nixlRemoteDisconnectError", "nixlMismatchError", "nixlInvalidParamError"):
        setattr(bindings, name, type(name, (Exception,), {}))
    api = ModuleType(f"{variant}._api")
    api.__dict__.update(nixlBind=bindings, nixl_agent=object, nixl_agent_config=object)
    monkeypatch.setitem(sys.modules, variant, ModuleType(variant))
    monkeypatch.setitem(sys.modules, f"{variant}._api", api)


def test_the_variant_that_is_loaded_already_is_taken_and_else_the_smallest(
    no_nixl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended(monkeypatch, "nixl_cu13")
    assert load_nixl().variant == "nixl_cu13"
    pretended(monkeypatch, "nixl_cu12")
    assert load_nixl().variant == "nixl_cu12"
    pretended(monkeypatch, "nixl")
    found = load_nixl()
    assert found.variant == "nixl"
    assert found.gone in found.errors


def test_where_there_is_no_nixl_the_extra_is_named(no_nixl: None) -> None:
    with pytest.raises(NixlMissing, match="extra `nixl`"):
        load_nixl()


def test_agents_get_names_that_no_other_had() -> None:
    assert len({agent_name("e0", 1) for _ in range(100)}) == 100
    assert agent_name("e0", 1).startswith("e0-1.")


async def test_nixl_alone_needs_nixl(no_nixl: None, memory: MappedCells) -> None:
    with pytest.raises(TransferError, match="extra `nixl`"):
        await open_transfers(TransferConfig(backend="nixl"), memory, "a", one_machine=True)


async def test_on_one_machine_nixl_is_left_alone(no_nixl: None, memory: MappedCells) -> None:
    shared, over_network = await open_transfers(TransferConfig(), memory, "a", one_machine=True)
    address = over_network.address(shared.address(own_address(memory)))
    assert (shared.name, over_network.name) == ("shared", "nixl")
    assert address.agent == ""
    assert shared.reaches(address)
    assert not over_network.reaches(address)
    for way in (shared, over_network):
        await way.close()


async def test_without_nixl_ranks_of_one_machine_still_read_each_other(
    no_nixl: None, memory: MappedCells, caplog: pytest.LogCaptureFixture
) -> None:
    (way,) = await open_transfers(TransferConfig(), memory, "a", one_machine=False)
    assert way.name == "shared"
    assert "extra `nixl`" in caplog.text


async def test_memory_that_cannot_be_shared_leaves_nixl(no_nixl: None, memory: MappedCells) -> None:
    memory.close()
    with pytest.raises(TransferError, match="cannot be shared"):
        await open_transfers(TransferConfig(backend="shared"), memory, "a", one_machine=True)
    with pytest.raises(TransferError, match="extra `nixl`"):
        await open_transfers(TransferConfig(), memory, "a", one_machine=True)
    way = SharedTransfer(memory, TransferConfig())
    assert not way.reaches(way.address(own_address(memory)))


def held(of: list[MappedCells]) -> tuple[int, int]:
    """Descriptors and mappings that this process has of these memories' files."""
    gc.collect()
    files = {os.fstat(one.descriptor).st_ino for one in of}
    descriptors = sum(
        link.exists() and link.stat().st_ino in files for link in Path("/proc/self/fd").iterdir()
    )
    return descriptors, sum(
        int(line.split()[4]) in files for line in Path("/proc/self/maps").read_text().splitlines()
    )


async def test_mappings_go_when_a_peer_is_forgotten_and_at_the_end(memory: MappedCells) -> None:
    theirs = [MappedCells(TENSORS, 3) for _ in range(3)]
    reader = SharedTransfer(memory, TransferConfig())
    addresses = [SharedTransfer(one, TransferConfig()).address(own_address(one)) for one in theirs]
    before = held(theirs)
    for one, address in zip(theirs, addresses, strict=True):
        one.cell(1)[:] = 7
        await reader.pull(address, [whole(1, 2)], 10)
        assert np.all(memory.cell(2) == 7)
    assert held(theirs) == (before[0] + 3, before[1] + 3)
    reader.forget(addresses[0])
    await reader.pull(addresses[1], [whole(1, 2)], 10)  # behind it in the thread's queue
    assert held(theirs) == (before[0] + 2, before[1] + 2)
    await reader.close()
    assert held(theirs) == before
    for one in theirs:
        one.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"inode": 1}, PeerGone),
        ({"descriptor": 1 << 20}, PeerGone),
        ({"pid": 1 << 30}, PeerGone),
        ({"cells": 1 << 20}, PeerGone),
        ({"pid": 0}, AddressRefused),
        ({"pid": -1}, AddressRefused),
        ({"host": "elsewhere"}, AddressRefused),
    ],
)
async def test_what_is_not_the_file_that_was_told_is_not_read(
    memory: MappedCells, wrong: dict[str, object], error: type[Exception]
) -> None:
    source = MappedCells(TENSORS, 3)
    address = SharedTransfer(source, TransferConfig()).address(own_address(source))
    reader = SharedTransfer(memory, TransferConfig())
    with pytest.raises(error):
        await reader.pull(msgspec.structs.replace(address, **wrong), [whole(1, 2)], 10)
    await reader.pull(address, [whole(1, 2)], 10)
    await reader.close()
    source.close()


async def test_memory_that_may_shrink_under_its_readers_is_not_mapped(memory: MappedCells) -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, memory.cells * memory.cell_bytes)
    reader = SharedTransfer(memory, TransferConfig())
    announced = reader.address(own_address(memory))
    lie = msgspec.structs.replace(announced, descriptor=descriptor, inode=os.fstat(descriptor).st_ino)
    with pytest.raises(AddressRefused, match="seal"):
        await reader.pull(lie, [whole(0, 1)], 10)
    await reader.close()
    os.close(descriptor)


async def test_the_rank_s_memory_is_of_a_file_that_goes_with_it(memory: MappedCells) -> None:
    assert memory.base % 4096 == 0
    assert memory.cell(2).ctypes.data == memory.base + 2 * memory.cell_bytes
    assert os.readlink(f"/proc/self/fd/{memory.descriptor}").startswith("/memfd:")
    with pytest.raises(IndexError):
        memory.cell(3)
    assert this_host()


def test_a_thread_that_cannot_be_made_nice_says_so(
    monkeypatch: pytest.MonkeyPatch, memory: MappedCells, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    monkeypatch.setattr(os, "setpriority", forbidden)
    caplog.set_level(logging.WARNING)
    reader, source = SharedTransfer(memory, TransferConfig(niceness=19)), MappedCells(TENSORS, 3)
    address = SharedTransfer(source, TransferConfig()).address(own_address(source))

    async def read() -> None:
        await reader.pull(address, [whole(0, 0)], 10)
        await reader.close()

    asyncio.run(read())
    assert "niceness 19" in caplog.text
    source.close()
