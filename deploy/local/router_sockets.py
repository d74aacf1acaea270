"""Sockets of the router's processes, which share a port."""

import socket
from dataclasses import dataclass

from deploy.http.sockets import CannotListen, listen, listen_together, url_of
from deploy.launch_spec import LaunchSpec
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class RouterSockets:
    """Open sockets while the context lasts. The supervisor keeps its copies, so that no connection is refused
    while a process restarts.

    shared: on one port, one per process. private: one per process if there are several; empty for one
    process.
    """

    shared: tuple[socket.socket, ...]
    private: tuple[socket.socket, ...]
    tls: bool = False

    @classmethod
    def listening(cls, config: RouterConfig) -> "RouterSockets":
        """Open the sockets. Raises CannotListen."""
        tls = config.tls_cert is not None
        if config.processes == 1:
            return cls((listen(config.host, config.port),), (), tls)
        shared = listen_together(config.host, config.port, config.processes)
        private: list[socket.socket] = []
        try:
            while len(private) < config.processes:
                private.append(
                    listen(config.host, config.private_port and config.private_port + len(private))
                )
        except CannotListen as error:
            cls(tuple(shared), tuple(private)).close()
            raise CannotListen(
                f"{error} (a private port of one of {config.processes} router processes: [router]"
                " private_port)"
            ) from error
        return cls(tuple(shared), tuple(private), tls)

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return url_of(self.shared[0], tls=self.tls)

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the URLs for the health probes of each process."""
        return tuple(url_of(listener, tls=self.tls) for listener in self.private or self.shared)

    def order(self, number: int, *, config: str, ready: str, bus: bool) -> LaunchSpec:
        """Return the launch spec of one process."""
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
        for listener in (*self.shared, *self.private):
            listener.close()

    def __enter__(self) -> "RouterSockets":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
