"""The sockets of the router's processes, which share a port."""

import socket
from dataclasses import dataclass

from deploy.http.sockets import CannotListen, listen, listen_together, url_of
from deploy.launch_spec import LaunchSpec
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class RouterSockets:
    """Open while the context lasts: kept open by the supervisor, too, so that nobody is refused while a process starts again.

    shared: on one port, one for each process. private: of each of several processes alone; empty for one.
    """

    shared: tuple[socket.socket, ...]
    private: tuple[socket.socket, ...]
    tls: bool = False

    @classmethod
    def listening(cls, config: RouterConfig) -> "RouterSockets":
        """CannotListen says which address cannot be had, and why."""
        tls = config.tls_cert is not None
        if config.processes == 1:
            return cls((listen(config.host, config.port),), (), tls)
        shared = listen_together(config.host, config.port, config.processes)
        private: list[socket.socket] = []
        try:
            while len(private) < config.processes:
                private.append(listen(config.host, config.private_port and config.private_port + len(private)))
        except CannotListen as error:
            cls(tuple(shared), tuple(private)).close()
            raise CannotListen(f"{error} (a private port of one of {config.processes} router processes: [router] private_port)") from error
        return cls(tuple(shared), tuple(private), tls)

    @property
    def url(self) -> str:
        """For clients."""
        return url_of(self.shared[0], tls=self.tls)

    @property
    def urls(self) -> tuple[str, ...]:
        """Where each process can be asked how it is."""
        return tuple(url_of(door, tls=self.tls) for door in self.private or self.shared)

    def order(self, number: int, *, config: str, ready: str, bus: bool) -> LaunchSpec:
        """What one of the processes is told."""
        several = bool(self.private)
        return LaunchSpec(
            part="router",
            config=config,
            ready=ready,
            number=number if several else None,
            descriptor=self.shared[number].fileno(),
            private=self.private[number].fileno() if several else None,
            bus=bus,
        )

    def close(self) -> None:
        for door in (*self.shared, *self.private):
            door.close()

    def __enter__(self) -> "RouterSockets":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
