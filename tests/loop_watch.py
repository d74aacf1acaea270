"""Counts the event loop thread's processor time by callback, and names the code of ours that takes too much
of it at once.

While a callback runs, nobody else of the process is served: tokens of all streams wait. Processor time is
counted, not wall time, so that a busy machine fails no test; collections of garbage are taken off, as any
callback may be hit by one. A second thread looks where a callback is that lasts too long: its own stack is
all that tells one request's part from another.

`KNOWN` lists the offenders there are. A test fails on others: `tests/conftest.py` watches those of the
folders in `WATCHED`.
"""

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

MOST_SECONDS = 0.005
"""of processor time, for one callback"""
SURELY_SECONDS = 0.05
"""A callback that takes this much, and was seen at it, fails its test at once."""
TIMES = 3
"""Between the two, this many of a kind in a session fail the last one's test: first calls import, compile and
fill caches, and on a processor that others share two in 1,400 tests of routers were beyond 5 ms by chance."""
WATCHED = ("router", "hostile")
"""folders of tests in which a router runs in the test's process"""
OURS = tuple(f"/{part}/" for part in ("router", "deploy", "bus", "fleet"))
_ROOT = str(Path(__file__).resolve().parent.parent)

_EVERY_REQUEST = "HttpExchange.run"
"""The task of any request. Callbacks that nothing was seen of would add up under its name, by chance."""
_WRITE = "deploy.http.write_coalescing.WriteCoalescing.flush"
"""A write gives the interpreter to the looking thread: it would be blamed for what came before it."""

KNOWN = {
    "router.service.RouterService.__init__": "made once, at the start",
    "router.telemetry.metrics.RouterMetrics.__init__": "made once, at the start",
    "router.telemetry.metrics.RouterMetrics.exposition": (
        "8 ms at 64 ranks, 48 ms at 1,000: `/metrics` is written on the loop"
    ),
    "router.bodies.worker_pool.WorkerProcess.call": (
        "the ids of a body of megabytes are copied out of the stream's buffer at once: 6 ms where cores are shared"
    ),
    "router.api.app.create_app": "made once, at the start",
    "router.api.app.RouterApp.openapi": "the document at /openapi.json, made when it is first asked for",
    "router.tokenization.tokenizer.ModelTokenizer.from_archive": (
        "in threads in a router; tests call it in their own process"
    ),
    "router.openai_api.request_schema.RequestDecoder.chat": "a body of megabytes is decoded on the loop",
    "router.openai_api.request_schema.RequestDecoder.text": "a body of megabytes is decoded on the loop",
    "router.wait_queue.WaitQueue._serve": "places are given 16 at once: some five milliseconds of deciding",
    "router.upstream.http_client.request_bytes": "a body of megabytes is joined to its head",
    "router.upstream.server_connection.Connection.send": (
        "a body of megabytes is copied into the kernel and the transport's buffer at once: 11 ms for 8 MB"
    ),
    "router.sync.fleet_subscriber.FleetSubscriber._price": (
        "what tokens cost at each rank, made anew after a join or a placement"
    ),
    "router.fleet_state.view.FleetView.target_table": (
        "made anew after a join or a leave: 3 ms at 1,000 ranks, 33 ms at worst"
    ),
    "router.fleet_state.view.FleetView.prices": "made anew after a placement changed",
    "router.prefix_index.block_index.BlockIndex.sweep": (
        "dictionaries grow at once: 38 ms at a million blocks"
    ),
    "router.prefix_index.kv_event_index.KvEventIndex.apply": (
        "dictionaries grow at once: 8 / 19 / 35 ms at 175k / 350k / 700k blocks"
    ),
}
"""Qualified names of code that may take longer, and why; whoever makes one fast takes it off."""


@dataclass
class Offence:
    """One callback that took too long."""

    seconds: float
    stack: tuple[str, ...] = ()
    """our functions in it, the outermost first, where it was seen; else the coroutine of its task"""
    was_seen: bool = True
    """False: no look fell into it, however long it took. One call into C kept the interpreter, or the machine
    did: chance, until it comes again"""

    @property
    def known(self) -> bool:
        return any(name in KNOWN for name in self.stack)

    @property
    def name(self) -> str:
        return self.stack[-1] if self.stack else "unseen"


@dataclass
class LoopWatch:
    """Watches the loop of the thread that `watching` runs in."""

    offences: list[Offence] = field(default_factory=list)
    _number: int = 0
    _since: float | None = None
    _collecting: float = 0.0
    _seen: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        run, thread, over = asyncio.Handle._run, threading.get_ident(), threading.Event()
        looker = threading.Thread(
            target=self._look, args=(thread, over), daemon=True, name="watches the loop"
        )

        def timed(handle: asyncio.Handle) -> None:
            self._number += 1
            self._collecting = 0.0
            before = time.thread_time()
            self._since = time.perf_counter()
            try:
                run(handle)
            finally:
                self._since = None
                spent = time.thread_time() - before - self._collecting
                if spent > MOST_SECONDS:
                    self._note(handle, spent)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        gc.callbacks.append(self._collected)
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()
            gc.callbacks.remove(self._collected)
            asyncio.Handle._run = run  # type: ignore[method-assign]

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            self._collecting += time.thread_time() * (1 if phase == "stop" else -1)

    def _look(self, thread: int, over: threading.Event) -> None:
        while not over.wait(MOST_SECONDS / 2):
            since, number = self._since, self._number
            if since is not None and time.perf_counter() - since > MOST_SECONDS / 2:
                frame = sys._current_frames().get(thread)
                stack = () if frame is None else _ours(frame)
                if number == self._number and _WRITE not in stack[-1:]:
                    # the deepest of several looks: the last one may come when the long part is just over
                    self._seen[number] = max(self._seen.get(number, ()), stack, key=len)

    def _note(self, handle: asyncio.Handle, spent: float) -> None:
        task = getattr(getattr(handle, "_callback", None), "__self__", None)
        coroutine: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
        code = getattr(coroutine, "cr_code", None)
        if code is not None and "/tests/" in code.co_filename:
            return  # the test's own work
        stack = self._seen.pop(self._number, ())
        was_seen = bool(stack)
        ours = code is not None and any(part in code.co_filename for part in OURS)
        if not stack and ours and code.co_qualname != _EVERY_REQUEST:
            stack = (f"{_module(code.co_filename)}.{code.co_qualname}",)
        if stack:
            self.offences.append(Offence(spent, stack, was_seen))


def _ours(innermost: FrameType) -> tuple[str, ...]:
    """Our functions of a stack, the outermost first; none where a test's own code is between them and the
    loop."""
    names: list[str] = []
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_name != "timed":
        file = frame.f_code.co_filename
        if file.startswith(f"{_ROOT}/tests/"):
            return ()
        if file.startswith(_ROOT) and any(part in file for part in OURS) and "/.venv/" not in file:
            names.append(f"{_module(file)}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(names))


def _module(file: str) -> str:
    return file.removeprefix(f"{_ROOT}/").removesuffix(".py").replace("/", ".")


def complaint(offences: list[Offence], before: "Counter[str]") -> str | None:
    """Why a test is to fail for what was seen in it; `before` counts names in the session, and is added
    to."""
    found = []
    for offence in offences:
        if offence.known:
            continue
        before[offence.name] += 1
        if before[offence.name] >= TIMES or (offence.was_seen and offence.seconds > SURELY_SECONDS):
            found.append(f"{1000 * offence.seconds:.1f} ms: {' > '.join(offence.stack)}")
    if not found:
        return None
    return (
        f"the event loop was held up for more than {1000 * MOST_SECONDS:g} ms of its thread's processor time"
        " by\n  "
        + "\n  ".join(found)
        + "\nmove that work off the loop or cut it into pieces; or, with a reason, add it to KNOWN in"
        " tests/loop_watch.py"
    )
