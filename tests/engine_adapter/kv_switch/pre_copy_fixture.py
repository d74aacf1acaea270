"""An engine that copies pages ahead while it serves, with reads of any duration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_adapter.kv_switch.ahead_reader import AheadReader, StartedRead
from engine_adapter.kv_switch.kv_state import KvState
from engine_adapter.kv_switch.pre_copy import MergePreCopy, ReaderOnly, SplitPreCopy
from engine_adapter.kv_switch.pre_copy_notes import PreCopyNote
from engine_adapter.kv_switch.scheduler_state import AheadCopies, state_of
from engine_adapter.kv_switch.splitting import RankLayout
from tests.engine_adapter.kv_switch.kv_fixture import SIZE, SwitchableEngine

Part = MergePreCopy | SplitPreCopy | ReaderOnly


@dataclass
class OpenRead:
    reader: AheadReader
    started: StartedRead
    overdue: bool = False


class CopyingEngine(SwitchableEngine):
    """Reads are carried out at the moment they end, in random order: a source that was reused by then, or a
    target that was given away, is found by the checks of the memory."""

    headroom = 2
    max_pages = 3
    """Announcements of a rank in a step."""
    end_probability = 0.4
    """Of each open read in each step."""
    overdue_probability = 0.02

    def __init__(self, ranks: int, groups: int, blocks: int, **options: Any) -> None:
        super().__init__(ranks, groups, blocks, **options)
        self.note_exchange = True
        self.open_reads: list[OpenRead] = []
        self.parts = self._parts_under_dp([[[]] for _ in range(ranks)])

    @property
    def owners(self) -> Sequence[MergePreCopy | SplitPreCopy]:
        return [part for part in self.parts if not isinstance(part, ReaderOnly)]

    def start_pre_copy(self) -> None:
        for part in self.owners:
            part.start()

    def _parts_under_dp(self, quarantined: Sequence[Sequence[Sequence[int]]]) -> Sequence[Part]:
        return [
            MergePreCopy(
                rank,
                one.scheduler.cache,
                one.units,
                ranks=self.ranks,
                groups=self.groups,
                headroom=self.headroom,
                quarantined=quarantined[rank][0],
            )
            for rank, one in enumerate(self.served)
        ]

    def _parts_under_tp(self, quarantined: Sequence[Sequence[Sequence[int]]]) -> Sequence[Part]:
        (one,) = self.served
        layout = RankLayout(self.ranks, self.groups, self.blocks, self.max_running, SIZE)

        def state(copies: AheadCopies) -> KvState:
            return state_of(one.scheduler, one.units, self.origins, tensor_parallel=True, copies=copies)

        owner = SplitPreCopy(
            one.scheduler.cache,
            one.units,
            state,
            layout,
            headroom=self.headroom,
            quarantined=quarantined[0],
        )
        return [owner, *(ReaderOnly(rank) for rank in range(1, self.ranks))]

    def copies(self, owner: int) -> AheadCopies:
        part = self.parts[owner]
        assert not isinstance(part, ReaderOnly)
        return part.copies()

    def exchange_notes(self) -> None:
        if not self.note_exchange:
            return
        notes = [
            part.note()
            if isinstance(part, ReaderOnly)
            else part.note(self.max_pages, self.served[part.rank].scheduler.lacking_pages)
            for part in self.parts
        ]
        notes = msgspec.msgpack.decode(msgspec.msgpack.encode(notes), type=list[PreCopyNote])
        for part in self.parts:
            part.hear(notes)
            self.open_reads += [OpenRead(part.reader, started) for started in part.reader.take_starts()]
        self.advance_reads()

    def advance_reads(self) -> None:
        """End some reads, and let others become overdue."""
        self.random.shuffle(self.open_reads)
        left: list[OpenRead] = []
        for one in self.open_reads:
            number, (source_rank, source, unit) = one.started
            if self.random.random() < self.end_probability:
                self.memory[one.reader.rank, unit] = self.memory[source_rank, source]
                one.reader.done(number)
                continue
            if not one.overdue and self.random.random() < self.overdue_probability:
                one.overdue = True
                one.reader.overdue(number)
            left.append(one)
        self.open_reads = left

    def adopt(self, states: Sequence[KvState]) -> None:
        super().adopt(states)
        quarantined = [state.quarantined for state in states]
        rebuild = self._parts_under_tp if self.tensor_parallel else self._parts_under_dp
        self.parts = rebuild(quarantined)

    def settle_reads(self) -> None:
        """Announce nothing until no read is open, overdue ones excepted."""
        self.max_pages = 0
        while not all(part.reader.quiet for part in self.parts):
            self.step()
        self.max_pages = CopyingEngine.max_pages

    def stop_pre_copy(self) -> None:
        """Give all copies up, step by step, while requests are served."""
        for part in self.owners:
            part.stop()
        while not all(part.idle for part in self.owners):
            self.step()
        for owner, one in enumerate(self.served):
            lost = {unit for units in self.copies(owner).quarantined for unit in units}
            for page in one.scheduler.cache.reserved:
                assert lost & set(one.units[page].tolist()), f"page {page} was not given back"
