"""Static backends (`[router] backends`, `[backends.NAME]`, `--backend`), queried from their router over HTTP
because they are not on the bus."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from deploy.terminal.output import aligned, console, in_json, printable, show
from deploy.views.decision import RouterAddress
from deploy.views.drain_report import drained, end_unless_idle
from fleet.text import counted
from router.api.backend_record import BackendSpeed, BackendStatus

_PATH = "/v1/backends"
_LOOK_SECONDS = 0.5
HEAD = (
    "backend",
    "state",
    "requests",
    "prefill",
    "prompt tok/s",
    "output tok/s",
    "speed",
    "KV cache",
    "models",
    "URL",
)
MAX_MODELS = 3


class _Listed(msgspec.Struct):
    data: list[BackendStatus]


def backends_of(router: RouterAddress) -> list[BackendStatus]:
    """Return the static backends of a router; end the command if it does not answer."""
    return msgspec.json.decode(router.get(_PATH), type=_Listed).data


def backends_if_any(router: RouterAddress) -> list[BackendStatus]:
    """Return the static backends; empty if no router answers or it refuses."""
    body = router.try_get(_PATH)
    try:
        return [] if body is None else msgspec.json.decode(body, type=_Listed).data
    except msgspec.DecodeError:
        return []  # a default address may belong to an unrelated server


def backend_lines(backends: Sequence[BackendStatus]) -> list[str]:
    """Return aligned columns, one line per backend."""
    return aligned([HEAD, *map(_row, backends)])


def show_backends(router: RouterAddress, backends: Sequence[BackendStatus], *, as_json: bool) -> None:
    """Print the `roost status` output of a router without a bus."""
    if as_json:
        show(in_json({"router": router.url, "backends": backends}))
        return
    show(f"router {router.url}: {counted(len(backends), 'backend')}")
    for line in backend_lines(backends) if backends else ():
        show(line)


def watch_backends(router: RouterAddress, interval: float, *, once: bool, as_json: bool) -> None:
    """Show the `roost top` output of a router without a bus, until Ctrl-C."""
    out = console()
    try:
        while True:
            backends = backends_of(router)
            if out.is_terminal and not as_json:
                out.clear()
            show_backends(router, backends, as_json=as_json)
            if once:
                return
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def drain_backend(
    router: RouterAddress, name: str, *, undo: bool, wait: float | None, reason: str, as_json: bool
) -> None:
    """Drain a backend at its router, or undo it. With `wait`, wait that many seconds until it is idle; exit
    with status 1 if it takes longer."""
    body: dict[str, Any] = {"draining": not undo, "reason": reason}
    now = msgspec.json.decode(router.post(f"{_PATH}/{name}/drain", body, {}), type=BackendStatus)
    ends = time.monotonic() + (wait or 0.0)
    while wait is not None and now.requests and time.monotonic() < ends:
        time.sleep(min(_LOOK_SECONDS, max(ends - time.monotonic(), 0.0)))
        now = next((one for one in backends_of(router) if one.name == name), now)
    idle = None if wait is None else not now.requests
    if as_json:
        show(in_json({"backend": now, "draining": not undo, "reason": reason, "idle": idle}))
    else:
        show(drained(name, f"{name} --undo --url {router.url}", undo=undo, idle=idle))
    end_unless_idle(name, idle, wait)


def _row(one: BackendStatus) -> tuple[str, ...]:
    models = [
        *one.models[:MAX_MODELS],
        *([f"and {len(one.models) - MAX_MODELS} more"] if len(one.models) > MAX_MODELS else []),
    ]
    state, speed = printable(one.state), one.speed
    requests, cache = f"{one.requests}/{one.max_requests}", "by tenant" if one.isolates_tenants else "shared"
    return (
        one.name,
        state,
        requests,
        str(one.prefill_tokens),
        *_speeds(speed),
        speed.source,
        cache,
        printable(", ".join(models)) or "-",
        one.url,
    )


def _speeds(speed: BackendSpeed) -> Iterator[str]:
    for each in (speed.prompt_tokens_per_second, speed.output_tokens_per_second):
        yield "-" if each is None else f"{each:,.0f}" if each >= 10 else f"{each:.1f}"
