"""Conditions for listening on an address that other machines reach: client keys or the fleet secret, and
TLS."""

import ipaddress
import socket
from collections.abc import Mapping

from deploy.sections import WorkerConfig
from engine_adapter.vllm.config import VllmConfig
from router.config import RouterConfig

_TLS = "TLS ([{section}] tls_cert and tls_key, or --tls-terminated where {terminated})"


def missing_at_router(config: RouterConfig) -> str | None:
    """Return what the router's listen addresses lack, with the remedy; None: nothing."""
    lacks = (
        []
        if config.api_key_file
        else ["client keys (--client-keys FILE; `roost key new TENANT --file FILE` writes one)"]
    )
    if config.tls_cert is None and not config.tls_terminated:
        lacks.append(_TLS.format(section="router", terminated="a proxy in front speaks TLS with clients"))
    found = _complaint("the router", config.host, lacks)
    if found is None and config.gateway_address is not None:
        host = config.gateway_address.rpartition(":")[0].strip("[]")
        found = _complaint("the router's endpoint picker", host, lacks)
    return found


def missing_at_ranks(config: WorkerConfig, *, secret_is_made: bool = False) -> str | None:
    """Return what the listen addresses of an engine's ranks lack, with the remedy; None: nothing.

    secret_is_made: a secret is generated at the start, if no file is set.
    """
    lacks = (
        []
        if config.fleet_secret_file or secret_is_made
        else ["the fleet's secret ([worker] fleet_secret_file, the same file as [router] fleet_secret_file)"]
    )
    if config.tls_cert is None and not config.tls_terminated:
        lacks.append(
            _TLS.format(section="worker", terminated="a service mesh encrypts what routers and ranks say")
        )
    return _complaint("the engine's ranks", config.host, lacks)


def missing_at_agent(config: VllmConfig) -> str | None:
    """Return what the address for vLLM's workers lacks, with the remedy; None: nothing."""
    lacks = ["encryption (connect the workers through a service mesh or a tunnel to a loopback address)"]
    return _complaint("the agent of vLLM's workers", config.address[0], lacks)


def missing_in_dynamo(config: WorkerConfig, environment: Mapping[str, str]) -> str | None:
    """Return what the addresses lack at which Dynamo's runtime would listen for a worker, with the remedy.
    The runtime has neither authentication nor encryption, and without these variables it listens on an
    address of the network."""
    if config.dynamo is None or config.tls_terminated:
        return None
    open_to_all = [
        variable
        for plane, variable in (
            ("DYN_REQUEST_PLANE", "DYN_TCP_RPC_HOST"),
            ("DYN_EVENT_PLANE", "DYN_EVENT_PLANE_HOST"),
        )
        if environment.get(plane) != "nats" and not is_loopback(environment.get(variable, ""))
    ]
    if not open_to_all:
        return None
    return (
        "Dynamo's runtime would listen where other machines reach it, without authentication or encryption:"
        f" set {' and '.join(open_to_all)} to 127.0.0.1 if the deployment is on this machine, or"
        " --tls-terminated where a service mesh protects it"
    )


def _complaint(door: str, host: str, lacks: list[str]) -> str | None:
    if not lacks or is_loopback(host):
        return None
    return f"{door} would listen on {host!r}, which other machines reach, without {' and '.join(lacks)}"


def is_loopback(host: str) -> bool:
    """Return whether an address, or every address of a name, is local to this machine. A name without an
    address counts as not local; binding it reports the error."""
    if not host:
        return False  # an empty host means every address
    try:
        found = {
            str(info[4][0])
            for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        }
    except OSError:
        return True
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
