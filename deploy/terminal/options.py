"""Options that several commands share. An option that is not given is None, or False."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read settings from this file instead of ./roost.toml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

# Commands that connect to a running fleet

NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="NATS server, e.g. nats://127.0.0.1:4222.  \\[default: that of the running `roost up`]",
    ),
]
EngineArgument = Annotated[
    str | None, typer.Argument(help="Engine.  \\[default: the only one with experts]", show_default=False)
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the router that serves static backends (--backend, \\[backends.NAME]): these are not on"
        " the bus.",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", metavar="FILE", help="File whose first line is a key accepted by the router."
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="PEM file of the certificate authorities for an https:// router."
    ),
]

# Commands that run parts

ServerOption = Annotated[str | None, typer.Option("--nats", metavar="URL", help="NATS server.")]
PortOption = Annotated[
    int | None, typer.Option("--port", help="Port of the router; 0: any free port.  \\[default: 8600]")
]
RouterHostOption = Annotated[
    str | None, typer.Option("--host", help="Address that the router listens on.  \\[default: 127.0.0.1]")
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Router processes that share the port and their state.  \\[default: 1]",
    ),
]
ClientKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--client-keys",
        metavar="FILE",
        help="Keys file written by `roost key new`. With it, clients must present a key; without it, they"
        " need none.",
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="PEM file of the server certificate; with --tls-key it enables TLS.",
    ),
]
TlsKeyOption = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM file of the certificate's key.")
]
TlsTerminatedOption = Annotated[
    bool,
    typer.Option("--tls-terminated", help="A proxy or a service mesh terminates TLS: listen without it."),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Allow listening for other machines without keys and TLS.")
]
ModelShapeOption = Annotated[
    str | None,
    typer.Option("--model-shape", help="simulated: deepseek-v3, qwen3-235b or demo.  \\[default: demo]"),
]
AccessLogOption = Annotated[
    str | None,
    typer.Option(
        "--access-log",
        metavar="FILE|none",
        help="Destination of request lines; a file may be rotated.  \\[default: standard output]",
    ),
]
SpansOption = Annotated[
    Path | None,
    typer.Option(
        "--spans", metavar="FILE", help="Append every OpenTelemetry span to this file, as JSON lines."
    ),
]
