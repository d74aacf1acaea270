"""The sockets of several router processes: one port for clients, one address each for operators, nothing left
open."""

import socket
from pathlib import Path

import msgspec
import pytest

from deploy.http.sockets import CannotListen, listen, listen_together
from deploy.launch_spec import LaunchSpec
from deploy.local.fleet import Fleet
from deploy.local.router_sockets import RouterSockets
from deploy.run_directory import run_directory
from deploy.sections import read_settings
from router.config import RouterConfig
from tests.conftest import free_port


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def close(doors: list[socket.socket]) -> None:
    for listener in doors:
        listener.close()


def test_several_sockets_share_a_port_and_split_its_connections() -> None:
    doors = listen_together("127.0.0.1", 0, 3)
    assert len({port_of(listener) for listener in doors}) == 1
    clients = [socket.create_connection(doors[0].getsockname()) for _ in range(64)]
    accepted = [_accepted(listener) for listener in doors]
    assert sum(accepted) == 64
    assert min(accepted) >= 3
    close([*clients, *doors])


def _accepted(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.mark.parametrize("others", [1, 2])
def test_a_port_that_somebody_else_listens_on_is_refused(others: int) -> None:
    """Also when it is another Roost of the same user, with which the kernel would share it."""
    taken = listen_together("127.0.0.1", 0, 2) if others == 2 else [listen("127.0.0.1", 0)]
    with pytest.raises(CannotListen, match="is another server there"):
        listen_together("127.0.0.1", port_of(taken[0]), 2)
    with pytest.raises(CannotListen):
        listen("127.0.0.1", port_of(taken[0]))
    close(taken)


def test_one_process_has_one_socket_and_no_private_one() -> None:
    with RouterSockets.listening(RouterConfig(port=0)) as doors:
        assert doors.urls == (doors.url,)
        order = doors.order(0, config="c", ready="r", bus=True)
        assert (order.number, order.private, order.descriptor) == (None, None, doors.shared[0].fileno())
    assert doors.shared[0].fileno() == -1


def test_each_of_several_processes_has_an_address_of_its_own() -> None:
    first = free_port()
    with RouterSockets.listening(RouterConfig(port=0, processes=2)) as doors:
        assert len({doors.url, *doors.urls}) == 3
        orders = [doors.order(number, config="c", ready="r", bus=False) for number in range(2)]
        assert [order.number for order in orders] == [0, 1]
        assert len({order.descriptor for order in orders} | {order.private for order in orders}) == 4
    with RouterSockets.listening(RouterConfig(port=0, processes=1, private_port=first)) as one:
        assert one.private == ()


def test_private_ports_are_counted_from_the_one_that_is_set_and_a_taken_one_is_named() -> None:
    taken = listen("127.0.0.1", 0)
    with pytest.raises(CannotListen, match=r"\[router\] private_port"):
        RouterSockets.listening(RouterConfig(port=0, processes=2, private_port=port_of(taken) - 1))
    taken.close()


@pytest.mark.parametrize("processes", [1, 2])
async def test_each_process_is_a_unit_of_its_own_and_is_told_its_sockets(
    processes: int, tmp_path: Path
) -> None:
    with (
        run_directory(tmp_path / "state") as run,
        RouterSockets.listening(RouterConfig(port=0, processes=processes)) as doors,
    ):
        async with Fleet(read_settings(None, {}, tmp_path), run, {}, lambda _: None) as fleet:
            units = fleet.routers(fleet.write_files(), doors, bus=False)
            lives = [await unit.launch() for unit in units]
        names = ["router"] if processes == 1 else ["router-0", "router-1"]
        assert [unit.name for unit in units] == names
        assert fleet.router_url == doors.url
        assert fleet.router_urls == (doors.urls if processes > 1 else ())
        orders = [msgspec.json.decode(life.commands[0].arguments[-1], type=LaunchSpec) for life in lives]
        assert [order.descriptor for order in orders] == [listener.fileno() for listener in doors.shared]
        assert not any(order.bus for order in orders)
        for life, order in zip(lives, orders, strict=True):
            assert set(life.commands[0].keep) == {order.descriptor, order.private} - {None}


@pytest.mark.parametrize(
    "settings",
    [{"processes": 0}, {"processes": 257}, {"processes": 2, "private_port": 65_535}, {"private_port": -1}],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"processes|private_port"):
        RouterConfig(**settings)  # type: ignore[arg-type]
