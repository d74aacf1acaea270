"""Switch of a rank between data-parallel and tensor-parallel attention, within one step
(docs/decisions/0020).

All ranks tell each other their pages, free units and requests. From that, each computes the same state of the
next layout. Then each reads the units that it lacks out of the others' memory. No rank writes into a page of
the next layout before all have read.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.kv_pool import KvPool
from engine_adapter.embedded.rank_requests import RankRequests, Switchover
from engine_adapter.embedded.step_notes import AheadNote
from engine_adapter.embedded.step_sync import StepHeader, StepSync
from engine_adapter.embedded.switching.copying_ahead import CopyingAhead
from engine_adapter.embedded.switching.peer_pools import PeerPools, UnitReader
from engine_adapter.kv_switch.kv_state import KvState, Switched, SwitchRefused
from engine_adapter.kv_switch.merging import merge
from engine_adapter.kv_switch.splitting import RankLayout, split
from fleet.layout import AttentionKind, held_limit

log = logging.getLogger(__name__)

_STATES = msgspec.msgpack.Decoder(KvState)


class PagedRunner(Protocol):
    """Part of a forward pass that knows where the units of pages are. See `model_runner.ModelRunner`."""

    @property
    def kv_pool(self) -> KvPool: ...

    @property
    def kv_units(self) -> NDArray[np.int32]:
        """Return int32 [pages, units of a page]."""
        ...

    def adopt_kv(self, units: NDArray[np.int32]) -> None:
        """Serve pages with these units from now on."""
        ...


class LastRound(NamedTuple):
    """Figures of the step in which a rank switched."""

    began: float
    """Monotonic clock, in seconds."""
    seconds: float
    """Duration, in which nothing was computed."""
    reading_seconds: float
    """Part of it in which units were read."""
    bytes: int
    """Read from other ranks in it."""
    ahead_bytes: int
    """Read from other ranks ahead of it."""
    pages: int
    """In use after it: on the rank, to tensor-parallel attention of the engine."""
    evicted: int
    """Blocks that are no longer registered, of all ranks."""


class AttentionSwitch:
    """Switch of one rank. `check` is thread-safe; everything else is for the step thread."""

    def __init__(
        self,
        runner: PagedRunner,
        peers: PeerPools,
        step_sync: StepSync,
        config: EmbeddedConfig,
        attention: AttentionKind,
    ) -> None:
        """attention: layout in which the engine starts."""
        self._runner = runner
        self._peers = peers
        self._sync = step_sync
        self._config = config
        self._rank = step_sync.rank
        self._units = runner.kv_units
        """int32 [pages, units of a page], under tensor-parallel attention those of all ranks."""
        if attention == "tp":  # All ranks begin with all units in order.
            self._units = np.repeat(self._units, config.ranks, axis=1)
        layout = RankLayout(config.ranks, runner.kv_pool.groups, config.kv_blocks, config.max_running)
        reader = UnitReader(peers, config.copy_ahead_bytes_per_second, step_sync.nudge)
        self.ahead = CopyingAhead(self._rank, layout, reader)
        self._held: tuple[int, ...] = ()
        self.last_round: LastRound | None = None
        """None: there was no switch."""

    @property
    def seconds(self) -> float:
        """Duration of the last switch, which no step could use. 0: there was none."""
        return 0.0 if self.last_round is None else self.last_round.seconds

    def pages(self, attention: AttentionKind) -> int:
        """KV pages that the scheduler of a rank has in a layout."""
        return self._config.kv_blocks * (self._runner.kv_pool.groups if attention == "tp" else 1)

    def heard(self, headers: Sequence[StepHeader]) -> None:
        """Note how many pages the requests of each rank hold."""
        self._held = tuple(header.held for header in headers)

    def note_ahead(self, requests: RankRequests, *, last: bool) -> AheadNote | None:
        """Return what the other ranks have to know about copies ahead of a switch. last: it is decided."""
        return self.ahead.note(requests, self._units, last=last)

    def check(self, to: AttentionKind) -> None:
        """Raise SwitchRefused if the pages that requests hold would not fit into the other layout beside the
        present one, unless requests may be preempted."""
        if self._config.preempt_to_switch:
            return
        ranks, groups = self._config.ranks, self._runner.kv_pool.groups
        units, held = self._config.kv_blocks * groups, sum(self._held)
        if to == "tp":
            needed = max(groups * own + held - own for own in self._held or (0,))
        else:
            needed = held + -(-held * (groups - 1) // ranks)
        if needed > units:
            raise SwitchRefused(
                f"attention cannot change to {to} now: open requests hold {held} pages, which takes {needed}"
                f" of a rank's {units} units of KV memory in both layouts; the limit is"
                f" {held_limit(ranks, groups):.0%} held. Wait until requests have finished, or set"
                " engine.preempt_to_switch"
            )

    def run(self, to: AttentionKind, requests: RankRequests) -> Switchover:
        """Bring the requests and their KV into the other layout. All ranks call it in the same step, and call
        `adopt` with the result once they serve that layout. StepSyncError when another rank is gone."""
        began = time.monotonic()
        mine = requests.state(self._units, self.ahead.copies())
        packed = b"" if mine is None else msgspec.msgpack.encode(mine)
        sizes = [size for (size,) in self._sync.gather([len(packed)])]
        states = [_STATES.decode(one) for one in self._sync.share(packed, sizes) if one]
        switched = self._switched(to, states)
        began_reading = time.monotonic()
        copied = self._peers.read(switched.reads[self._rank])
        reading_seconds = time.monotonic() - began_reading
        self._sync.gather([])  # Nobody writes before all have read.
        state = switched.states[0 if to == "tp" else self._rank]
        width = self._config.ranks if to == "tp" else self._runner.kv_pool.groups
        found = requests.restore(to, state, self.pages(to), width)
        ahead = self.ahead.bytes
        self.ahead.switched(state.quarantined)
        self.last_round = LastRound(
            began,
            time.monotonic() - began,
            reading_seconds,
            copied,
            ahead,
            len(state.pages),
            len(switched.evicted),
        )
        log.info(
            "rank %d: attention is %s from here on: %d requests, %d pages, %.1f kB read in %.1f ms, %d blocks"
            " evicted",
            self._rank,
            to,
            len(state.running) + len(state.waiting),
            len(state.pages),
            copied / 1e3,
            1e3 * self.seconds,
            len(switched.evicted),
        )
        return found

    def adopt(self, to: AttentionKind, found: Switchover) -> None:
        """Compute with the pages of the layout that is served now."""
        self._units = found.units
        own = found.units[:, self._rank : self._rank + 1] if to == "tp" else found.units
        self._runner.adopt_kv(np.ascontiguousarray(own))

    def _switched(self, to: AttentionKind, states: Sequence[KvState]) -> Switched:
        config, groups = self._config, self._runner.kv_pool.groups
        if to == "tp":
            return merge(states, groups=groups, max_running=config.max_running * config.ranks, preempt=True)
        return split(
            states[0],
            ranks=config.ranks,
            groups=groups,
            max_pages=config.kv_blocks,
            max_running=config.max_running,
            preempt=True,
        )
