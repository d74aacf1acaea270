"""gRPC server of the endpoint picker, with gRPC's health service."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from router.gateway.messages import (
    HealthCheckRequest,
    HealthCheckResponse,
    Message,
    ProcessingRequest,
    Undecodable,
)
from router.gateway.picker import EndpointPicker
from router.gateway.protocol import ProtocolFault

log = logging.getLogger(__name__)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
_LIVENESS = "liveness"
_READINESS = ("", "readiness", EXT_PROC)
"""Services of health checks that ask if requests are served; the protocol names them."""
_SERVING, _NOT_SERVING = 1, 2
_OVERHEAD_BYTES = 1024 * 1024
"""Bytes of a message around a buffered body."""

Certificate = Callable[[], tuple[bytes, bytes]]
"""Return the certificate chain and its private key, both PEM. OSError when they cannot be read."""


class GatewayServer:
    """Server of one picker, from `open` until `close`."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    @classmethod
    async def open(
        cls,
        picker: EndpointPicker,
        address: str,
        *,
        max_body_bytes: int,
        certificate: Certificate | None = None,
        shared: bool = False,
    ) -> "GatewayServer":
        """Listen on HOST:PORT. certificate: None: without TLS; else read again before each handshake. shared:
        other processes listen on the same port. OSError when the address cannot be used.
        """
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", int(shared)),
                ("grpc.max_receive_message_length", max_body_bytes + _OVERHEAD_BYTES),
            )
        )
        server.add_generic_rpc_handlers((_handlers(picker),))
        try:
            port = (
                server.add_insecure_port(address)
                if certificate is None
                else server.add_secure_port(address, _credentials(certificate))
            )
        except RuntimeError as error:
            raise OSError(f"the gateway's address {address} cannot be used: {error}") from error
        await server.start()
        return cls(server, port)

    async def close(self, seconds: float) -> None:
        """Take no further streams, and give the open ones this long to end."""
        await self._server.stop(seconds)


def _handlers(picker: EndpointPicker) -> grpc.GenericRpcHandler:
    async def process(messages: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        # writes instead of yielding, so that the end of a stream is raised here while a write waits, too
        try:
            async with aclosing(picker.process(_decoded(messages))) as answers:
                async for answer in answers:
                    await context.write(answer.SerializeToString())
        except (ProtocolFault, Undecodable) as error:
            log.warning("a gateway's stream is refused: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def check(request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        try:
            service = HealthCheckRequest.FromString(request).service
        except Undecodable as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if service not in (_LIVENESS, *_READINESS):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {service[:64]!r} is here")
        serving = service == _LIVENESS or picker.ready
        answer: bytes = HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING).SerializeToString()
        return answer

    methods = {
        f"/{EXT_PROC}/Process": grpc.stream_stream_rpc_method_handler(process),
        f"/{HEALTH}/Check": grpc.unary_unary_rpc_method_handler(check),
    }

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
        def service(self, handler_call_details: Any) -> Any:
            return methods.get(handler_call_details.method)

    return Handlers()


async def _decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for message in messages:
        yield ProcessingRequest.FromString(message)


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return credentials that follow a renewed certificate."""
    last = [certificate()]

    def renewed() -> Any:
        try:
            found = certificate()
        except OSError as error:
            log.warning("the gateway's certificate cannot be read again: %s", error)
            return None
        if found == last[0]:
            return None
        last[0] = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(last[0]), renewed, require_client_authentication=False
    )


def _configuration(found: tuple[bytes, bytes]) -> Any:
    chain, key = found
    return grpc.ssl_server_certificate_configuration([(key, chain)])
