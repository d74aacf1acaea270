"""Workers with the plugin's own connection and mailbox before the agent's server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from roost_vllm.wire import MapStatus as PluginStatus
from roost_vllm.wire import SlotMismatch, frame, proof

from deploy.process import alongside
from engine_adapter.engine import EngineFailed
from engine_adapter.vllm import worker_server
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.wire import MAX_FRAME_BYTES, AgentHello, AgentWelcome, LinkError
from engine_adapter.vllm.worker_maps import WorkerMaps
from engine_adapter.vllm.worker_server import WorkerServer, framed
from fleet.placement import Placement
from tests.engine_adapter.vllm.plugin_workers import (
    SECRET,
    PluginWorker,
    connected,
    disconnect,
    placement,
    table,
    until,
    vote,
)

LISTEN = VllmConfig(listen="127.0.0.1:0", vote_steps=8)


@asynccontextmanager
async def serving(epoch: int = 4, config: VllmConfig = LISTEN) -> AsyncIterator[WorkerServer]:
    """A server of workers. epoch: of the first map that nobody named; each further one has the next."""
    epochs = count(epoch)

    async def next_epoch() -> int:
        return next(epochs)

    server = WorkerServer(config, SECRET, next_epoch)
    async with asyncio.timeout(30), alongside(server.serve(), "server"):
        await server.listening.wait()
        yield server


async def complete(server: WorkerServer) -> WorkerMaps:
    return await server.another(None)


def states(maps: WorkerMaps) -> list[Any]:
    found = [maps.status(rank) for rank in range(maps.ranks)]
    return [None if one is None else one.state for one in found]


async def test_workers_of_one_start_form_an_engine_and_its_map_gets_an_epoch() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving(epoch=4) as server:
        await asyncio.sleep(0.05)
        assert server.current() is None
        async with connected(server, *workers):
            maps = await complete(server)
            assert (maps.placement.epoch, maps.placement.ranks) == (4, 2)
            assert (maps.placement.expert_of_slot == table()).all()
            await until(lambda: [worker.mailbox.epoch for worker in workers] == [4, 4])
            assert {worker.welcomes[0].vote_steps for worker in workers} == {8}
            assert maps.pids == {0: 1000, 1: 1001}


async def test_a_map_comes_into_force_when_all_ranks_serve_it() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        for rank in range(2):
            maps.stage(rank, 7, placement(1, epoch=5))
        await until(lambda: states(maps) == ["staged", "staged"])
        maps.permit(0, 7)
        await until(lambda: states(maps) == ["voting", "staged"])
        assert not vote(workers)
        maps.permit(1, 7)
        await until(lambda: states(maps) == ["voting", "voting"])
        workers[0].carry_out()
        await until(lambda: states(maps) == ["idle", "voting"])
        assert maps.placement.epoch == 4  # the other rank still serves the old map
        workers[1].carry_out()
        await until(lambda: maps.placement == placement(1, epoch=5))
        first = maps.status(0)
        assert first is not None
        assert (first.flipped, first.epoch, first.handover) == (7, 5, 7)


async def test_a_stale_map_is_rejected_with_the_reason() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        maps.stage(0, 7, placement(1, epoch=4))
        await until(lambda: (maps.status(0) or PluginStatus) and getattr(maps.status(0), "handover", 0) == 7)
        status = maps.status(0)
        assert status is not None
        assert status.state == "idle"
        assert "stale epoch" in status.reason


async def test_a_dropped_map_is_past() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        maps.stage(0, 7, placement(1, epoch=5))
        maps.permit(0, 7)
        await until(lambda: states(maps) == ["voting", "idle"])
        maps.drop(0, 7, "over")
        await until(lambda: states(maps) == ["refused", "idle"])
        maps.stage(0, 7, placement(1, epoch=5))
        maps.stage(1, 8, placement(1, epoch=5))
        await until(lambda: states(maps) == ["refused", "staged"])


async def test_a_worker_that_is_not_connected_has_no_status_and_keeps_what_it_holds() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        for rank in range(2):
            maps.stage(rank, 7, placement(1, epoch=5))
        await until(lambda: states(maps) == ["staged", "staged"])
        waiting = asyncio.create_task(maps.changed())
        await disconnect(workers[1])
        await waiting
        await until(lambda: states(maps) == ["staged", None])
        maps.permit(1, 7)  # lost
        assert server.current() is None
        workers[1].connect(server.address)
        assert await complete(server) is maps
        await until(lambda: states(maps) == ["staged", "staged"])
        assert workers[1].mailbox.proposal() is None


async def introduced(
    server: WorkerServer, worker: PluginWorker
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which a worker has introduced itself and was welcomed."""
    reader, writer = await asyncio.open_connection(*server.address)
    size = int.from_bytes(await reader.readexactly(4), "big")
    asked = msgspec.msgpack.decode(await reader.readexactly(size), type=AgentHello)
    writer.write(frame(worker.hello(proof=proof(SECRET, "worker", asked.nonce), nonce=b"n" * 32)))
    size = int.from_bytes(await reader.readexactly(4), "big")
    welcome = msgspec.msgpack.decode(await reader.readexactly(size), type=AgentWelcome)
    assert welcome.epoch == 4
    return reader, writer


async def test_a_worker_that_connects_anew_is_not_spoken_for_by_its_earlier_connection() -> None:
    """Its network stood still: what it sent before arrives after it has connected again."""
    worker = PluginWorker(0)
    async with serving() as server, connected(server, PluginWorker(1)):
        earlier, delayed = await introduced(server, worker)
        maps = await complete(server)
        voting = PluginStatus(
            state="voting", handover=7, digest="d", served=worker.mailbox.served, flipped=0, epoch=4
        )
        _, writer = await introduced(server, worker)
        with suppress(ConnectionError):
            delayed.write(frame(voting))
            await delayed.drain()
        assert await earlier.read() == b"", "the agent closes the earlier connection"
        await asyncio.sleep(0.05)
        status = maps.status(0)
        assert status is not None
        assert (status.state, status.handover) == ("idle", 0)
        assert server.current() is maps
        delayed.close()
        writer.close()


async def test_a_restarted_agent_learns_the_epoch_and_never_names_one() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving(epoch=4) as server, connected(server, *workers):
        maps = await complete(server)
        for rank in range(2):
            maps.stage(rank, 7, placement(1, epoch=5))
            maps.permit(rank, 7)
        await until(lambda: states(maps) == ["voting", "voting"])
    assert vote_without_agent(workers)
    async with serving(epoch=99) as server, connected(server, *workers):
        maps = await complete(server)
        assert maps.placement == placement(1, epoch=5)
        status = maps.status(1)
        assert status is not None
        assert (status.flipped, status.epoch) == (7, 5)


def vote_without_agent(workers: list[PluginWorker]) -> bool:
    """The workers vote and move while nobody listens."""
    for worker in workers:
        held = worker.mailbox.pass_vote()
        worker.mailbox.come_into_force(held.table)
    return True


async def test_another_start_waits_until_all_of_its_workers_are_there() -> None:
    old = [PluginWorker(0), PluginWorker(1)]
    new = [PluginWorker(0, instance="start 2"), PluginWorker(1, instance="start 2")]
    async with serving() as server, connected(server, *old):
        first = await complete(server)
        async with connected(server, new[0]):
            another = asyncio.create_task(server.another(first.instance))
            await until(lambda: bool(new[0].welcomes))
            assert server.current() is first
            async with connected(server, new[1]):
                second = await another
                assert second.instance == "start 2"
                assert server.current() is second
        await until(lambda: server.current() is first)


async def test_workers_that_contradict_the_others_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    odd = PluginWorker(1)
    odd.slots = 5
    async with serving() as server, connected(server, PluginWorker(0), odd):
        await until(
            lambda: "slots is 5 here and 4 on expert rank 0" in caplog.text or "slots is 4" in caplog.text
        )
        assert server.current() is None


async def test_ranks_that_serve_different_maps_are_told(caplog: pytest.LogCaptureFixture) -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    workers[1].mailbox = type(workers[1].mailbox)(table(3), 6)
    async with serving() as server, connected(server, *workers):
        await complete(server)
        await until(lambda: "serve different maps" in caplog.text)


async def test_a_plugin_that_lacks_names_takes_no_placements() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    workers[0].missing = ("EplbState.policy",)
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        assert maps.refusal == "vLLM 0.32.0 lacks what the plugin needs: EplbState.policy"
        assert maps.fault == ""


async def test_copies_with_other_weights_are_a_fault_that_no_map_follows() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        await until(lambda: bool(maps.expert_digests))
        workers[1].send(workers[1].digests(wrong=(1, 2)))
        await until(lambda: bool(maps.fault))
        # rank 1 holds experts 4, 5, 0, 1 in its slots
        assert maps.fault.startswith("the copy of expert 0 of layer 1 in slot 2 of expert rank 1")
        maps.stage(0, 7, placement(1, epoch=5))
        maps.drop(0, 6, "marks what was sent before")
        await until(lambda: bool(workers[0].received))
        assert not any(type(one).__name__ == "StageMap" for one in workers[0].received)


async def test_a_mismatch_that_a_worker_finds_is_a_fault() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        workers[0].send(SlotMismatch(layer=1, slot=3, expert=3, expected="a", found="b"))
        await until(lambda: bool(maps.fault))
        assert "slot 3 of layer 1 does not hold the weights of expert 3" in maps.fault


async def test_a_map_that_vllm_itself_chose_ends_the_incarnation() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        await until(lambda: [worker.mailbox.epoch for worker in workers] == [4, 4])
        for worker in workers:
            worker.mailbox.replaced_by_vllm(table(2))
            worker.send(
                msgspec.convert(
                    {
                        "type": "moved",
                        "handover": 0,
                        "map": table(2).astype("<i2").tobytes(),
                        "received": 1,
                        "seconds": 1.0,
                    },
                    worker_moved(),
                )
            )
            worker.send(worker.mailbox.status())
        await until(lambda: maps.replaced)
        assert maps.placement.epoch == 4
        server.forget(maps)
        await until(lambda: server.current() not in (None, maps))
        again = await complete(server)
        assert (again.placement.expert_of_slot == table(2)).all()
        assert again.placement.epoch == 5


@pytest.mark.parametrize("chosen", [2, 0], ids=["another map", "the initial map"])
async def test_a_map_that_vllm_chose_while_no_agent_was_there_never_gets_an_epoch_of_an_earlier_one(
    chosen: int,
) -> None:
    """The network was apart for so long that vLLM's own policy took over, and the agent lived."""
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving(epoch=7) as server:
        async with connected(server, *workers):
            maps = await complete(server)
            for rank in range(2):
                maps.stage(rank, 3, placement(1, epoch=9))
                maps.permit(rank, 3)
            await until(lambda: states(maps) == ["voting", "voting"])
            assert vote(workers)
            await until(lambda: maps.placement.epoch == 9)
        for worker in workers:
            worker.mailbox.replaced_by_vllm(table(chosen))
        async with connected(server, *workers):
            await until(lambda: maps.replaced)
            server.forget(maps)
            await until(lambda: server.current() not in (None, maps))
            again = await complete(server)
    assert (again.placement.expert_of_slot == table(chosen)).all()
    assert again.placement.epoch == 8, "what the server was told when it asked for an epoch"


def worker_moved() -> Any:
    from roost_vllm.wire import MapMoved

    return MapMoved


# What is wrong


async def replies(server: WorkerServer, sent: bytes) -> list[Any]:
    """What the server says to a stranger until it hangs up."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(sent)
    found = []
    try:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            found.append(msgspec.msgpack.decode(await reader.readexactly(size)))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return found
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"\x00\x00\x00\x01\xc1", "no message of the protocol"),
        (framed(AgentHello(protocol=1, nonce=b"x")), "no message of the protocol"),
        (framed(LinkError(reason="no")), "it says: no"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "at most"),
        (b"\x00\x30\x00\x00", "at most"),
    ],
)
async def test_what_is_no_introduction_is_answered_and_closed(sent: bytes, says: str) -> None:
    async with serving() as server:
        hello, error = await replies(server, sent)
        assert hello["type"] == "hello"
        assert error["type"] == "error"
        assert says in error["reason"]


async def test_a_worker_without_the_secret_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    worker = PluginWorker(0, ranks=1, targets=1)
    async with serving() as server:
        worker.connect(server.address, b"another secret")
        await until(lambda: "it does not know the secret: ROOST_SECRET_FILE" in caplog.text)
        await disconnect(worker)
        assert server.current() is None
        assert not worker.welcomes


async def test_an_agent_without_the_secret_is_refused_by_the_plugin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    worker = PluginWorker(0, ranks=1, targets=1)

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(AgentHello(protocol=1, nonce=b"n" * 32)))
        await reader.readexactly(4)
        writer.write(framed(AgentWelcome(proof=b"no proof", epoch=1, report_seconds=1.0, vote_steps=1)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    async with asyncio.timeout(10), server:
        worker.connect(server.sockets[0].getsockname()[:2])
        await until(lambda: "the agent does not know the secret" in caplog.text)
        await disconnect(worker)
    assert not worker.welcomes


async def test_another_protocol_is_refused_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    worker = PluginWorker(0)
    worker.protocol = 2
    async with serving() as server, connected(server, worker):
        await until(lambda: "install roost and roost-vllm of the same release" in caplog.text)


async def test_a_silent_stranger_is_closed_and_too_many_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_server, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(worker_server, "MAX_STRANGERS", 1)
    async with serving() as server:
        slow = asyncio.create_task(replies(server, b""))
        await asyncio.sleep(0.05)
        (refused,) = await replies(server, b"")
        assert "too many connections" in refused["reason"]
        hello, error = await slow
        assert hello["type"] == "hello"
        assert "the handshake took too long" in error["reason"]


async def test_a_wrong_message_later_ends_only_that_connection() -> None:
    workers = [PluginWorker(0), PluginWorker(1)]
    async with serving() as server, connected(server, *workers):
        maps = await complete(server)
        assert workers[0].link is not None
        workers[0].send(msgspec.structs.replace(workers[0].digests(), digests=(("too", "few"),)))
        await until(lambda: len(workers[0].welcomes) == 2)  # it was closed, and has connected again
        assert await complete(server) is maps
        assert len(workers[1].welcomes) == 1


async def test_an_address_that_is_taken_is_an_error() -> None:
    async with serving() as server:
        host, port = server.address
        second = WorkerServer(VllmConfig(listen=f"{host}:{port}"), SECRET, asyncio.sleep)  # type: ignore[arg-type]
        with pytest.raises(EngineFailed, match=r"cannot listen on .*give it another address with --listen"):
            await second.serve()


def test_placements_of_the_fixture_are_legal() -> None:
    assert isinstance(placement(1, 5), Placement)


async def test_a_server_that_stops_ends_its_connections_without_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        await reader.readexactly(4)  # the server's greeting has begun
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    await asyncio.wait_for(reader.read(), 5)
    assert reader.at_eof()
    writer.close()
