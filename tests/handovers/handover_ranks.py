"""Steps of the model's ranks, each on its own: receive commands, read, verify, adopt. See
`handover_model`."""

from collections.abc import Iterator, Sequence

from fleet.handover import (
    Cell,
    CellEvent,
    CommandVerdict,
    Filling,
    ProtocolState,
    RankState,
    aborted,
    committed,
    flipped,
    proposed,
    staged,
    with_token,
)
from tests.handovers.exploration import Kind
from tests.handovers.handover_world import (
    ABORT,
    COMMIT,
    FLIPPED,
    GIVEN_UP,
    PROPOSE,
    STAGED,
    WHOLE,
    Around,
    CellRecord,
    Flow,
    Own,
    Rank,
    Rules,
    Size,
    fact_of,
)


class Ranks(Rules):
    """Steps of a rank."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def born(self, epoch: int, made: int, said: int) -> Rank:
        form = self._form(epoch, 1)
        cells = (CellRecord(Cell.LIVE, epoch, form), *[CellRecord(Cell.FREE)] * (self.size.cells - 1))
        return Rank(ProtocolState(RankState.SERVING, epoch), epoch, made, cells, (), said, form, form)

    def obeyed(self, rank: Rank, kind: int, token: int, handover: int, epoch: int, around: Around) -> Rank:
        protocol_state = rank.protocol_state
        assert protocol_state is not None
        sender = token
        handover, token = (
            self.meant(protocol_state, kind, handover, epoch),
            self.fenced(protocol_state, token),
        )
        verdict = self.heed(protocol_state, kind, token, handover, epoch)
        if verdict is CommandVerdict.FENCED:
            return rank
        said = rank.said | (
            fact_of(GIVEN_UP, handover)
            if kind == ABORT and verdict in (CommandVerdict.TAKE, CommandVerdict.REPEAT)
            else 0
        )
        rank = rank._replace(protocol_state=with_token(protocol_state, token), said=said)
        if verdict is not CommandVerdict.TAKE:
            return rank
        if kind == PROPOSE:
            opened = proposed(protocol_state, token, handover)
            return self._opening(
                rank._replace(protocol_state=opened, next_form=self._form(epoch, sender)), opened, around
            )
        if kind == COMMIT:
            return rank._replace(protocol_state=committed(protocol_state, token))
        return (self.dropped(rank) if handover == protocol_state.handover else rank)._replace(
            protocol_state=aborted(protocol_state, token, handover)
        )

    def _form(self, epoch: int, token: int) -> int:
        return self.form(epoch, token) if self.size.turns else WHOLE

    def _opening(self, rank: Rank, protocol_state: ProtocolState, around: Around) -> Rank:
        if self.size.turns and rank.next_form == rank.form:
            return self._telling(
                rank._replace(protocol_state=staged(protocol_state)), STAGED, protocol_state.handover
            )
        return self._reading(rank, around)

    def dropped(self, rank: Rank) -> Rank:
        for cell, record in enumerate(rank.cells):
            if record.use in (Cell.PULLING, Cell.VERIFYING):
                rank = self._given_up(rank, cell, record.filling)
            elif record.use is Cell.STAGED:
                rank = self._used(rank, cell, CellEvent.DROPPED)
        return rank

    def own(self, rank: Rank, protocol_state: ProtocolState, around: Around) -> Iterator[Own]:
        if protocol_state.state is RankState.READY and rank.steps > protocol_state.served:
            yield Own(
                Kind.DUE,
                "the agent of rank {} hears that it flipped: the old cell drains",
                self._adopted(rank, protocol_state, around.readers),
            )
        if protocol_state.state is RankState.STAGED:
            alone = self.gives_up(rank, protocol_state)
            if alone is not None:
                yield Own(Kind.MAY, "rank {} has waited long enough, and gives up", alone)
        if protocol_state.state is RankState.STAGING and not any(
            record.use in (Cell.PULLING, Cell.VERIFYING) for record in rank.cells
        ):
            yield from self._beginning(rank, protocol_state, around)
        for cell, record in enumerate(rank.cells):
            for part in range(len(self.size.sources)):
                yield from self._part(rank, protocol_state, cell, part, around)
            if record.use is Cell.DRAINING and self.drained(around.readers, cell):
                yield Own(
                    Kind.DUE,
                    f"nobody reads cell {cell} of rank {{}} any more: it is free",
                    self._used(rank, cell, CellEvent.SETTLED),
                )

    # --- reads ---

    def _beginning(self, rank: Rank, protocol_state: ProtocolState, around: Around) -> Iterator[Own]:
        reading = self._reading(rank, around)
        if reading is not rank:
            yield Own(Kind.DUE, "rank {} tries again, and reads its expert of rank {}", reading)
        if reading is rank or any(record.use is Cell.QUARANTINED for record in rank.cells):
            yield Own(
                Kind.DUE,
                "rank {} cannot stage, and says so",
                rank._replace(protocol_state=staged(protocol_state, failed=True)),
            )

    def _reading(self, rank: Rank, around: Around) -> Rank:
        """Start to read if all sources and a free cell exist; otherwise unchanged."""
        rank = self.with_room(rank)
        assert rank.protocol_state is not None
        served = rank.protocol_state.served
        free = [cell for cell, record in enumerate(rank.cells) if self.reservable(record.use)]
        if not free or any(epoch != served for _, epoch in around.offers):
            return rank
        cell, parts = free[0], len(self.size.sources)
        reserved = CellRecord(
            self.cell_after(rank.cells[cell].use, CellEvent.RESERVED),
            served + 1,
            rank.next_form,
            Filling.of(parts),
        )
        rank = _with(rank, cell, reserved)
        for part in () if self.size.one_by_one else range(parts):
            rank = self._begun(rank, cell, part, around)
        return rank

    def _begun(self, rank: Rank, cell: int, part: int, around: Around) -> Rank:
        record = rank.cells[cell]
        rank = _with(rank, cell, record._replace(filling=record.filling.begun(part)))
        return rank._replace(flows=(*rank.flows, Flow(cell, part, around.offers[part][0])))

    def _part(
        self, rank: Rank, protocol_state: ProtocolState, cell: int, part: int, around: Around
    ) -> Iterator[Own]:
        """Yield the steps of one part of what fills a cell."""
        record = rank.cells[cell]
        filling, distance = record.filling, self.size.sources[part]
        flying = any((flow.cell, flow.part) == (cell, part) for flow in rank.flows)
        what = f"the read into cell {cell} of rank {{}}"
        if self.size.turns:
            what = f"the read of part {part} into cell {cell} of rank {{0}} from rank {{{distance + 1}}}"
        alive = around.offers[part][0] >= 0
        match record.use:
            case Cell.PULLING if filling.waiting >> part & 1:
                if around.offers[part][1] == protocol_state.served:
                    yield Own(Kind.DUE, f"{what} begins", self._begun(rank, cell, part, around))
                else:
                    yield Own(Kind.DUE, f"{what} is refused", self._lost(rank, cell, part))
            case Cell.PULLING if filling.reading >> part & 1 and alive:
                yield from self._arriving(rank, protocol_state, cell, part, what)
            case Cell.PULLING if filling.reading >> part & 1:
                yield Own(Kind.DUE, f"{what} breaks", self._lost(rank, cell, part))
            case Cell.PULLING | Cell.VERIFYING if filling.comparing >> part & 1:
                yield from self._comparing(rank, protocol_state, cell, part)
            case Cell.QUARANTINED if flying or (filling.reading | filling.comparing) >> part & 1:
                settled = self._moved(self._ended(rank, cell, part), cell, filling.done(part))
                yield Own(Kind.DUE, f"nothing lands any more in cell {cell} of rank {{}}", settled)
            case _ if flying:
                yield Own(
                    Kind.DUE,
                    f"nothing lands any more in cell {cell} of rank {{}}",
                    self._ended(rank, cell, part),
                )

    def _arriving(
        self, rank: Rank, protocol_state: ProtocolState, cell: int, part: int, what: str
    ) -> Iterator[Own]:
        landed = self._moved(self._ended(rank, cell, part), cell, rank.cells[cell].filling.landed(part))
        if self.size.verified_at_once:
            yield from self._comparing(landed, protocol_state, cell, part)
        else:
            yield Own(Kind.DUE, f"all bytes have landed: {what}", landed)
        if self.size.sources[part]:
            flow = next(flow for flow in rank.flows if (flow.cell, flow.part) == (cell, part))
            again = self.reread(rank, flow)
            yield Own(
                Kind.FAULT,
                f"{what} is overdue, and given up",
                self._lost(rank, cell, part, overdue=True) if again is None else again,
                "overdue",
            )

    def _comparing(self, rank: Rank, protocol_state: ProtocolState, cell: int, part: int) -> Iterator[Own]:
        verified = self._moved(rank, cell, rank.cells[cell].filling.done(part))
        name = f"part {part} of cell {cell}" if self.size.turns else f"cell {cell}"
        told = f"rank {{}} has verified {name}"
        if verified.cells[cell].use is Cell.STAGED:
            told += ", and says that it has staged"
            verified = self._telling(
                verified._replace(protocol_state=staged(protocol_state)), STAGED, protocol_state.handover
            )
        yield Own(Kind.DUE, told, verified)
        yield Own(
            Kind.FAULT,
            f"the checksums of {name} of rank {{}} are not those promised",
            self._lost(rank, cell, part),
            "corrupted",
        )

    def _lost(self, rank: Rank, cell: int, part: int, *, overdue: bool = False) -> Rank:
        """Give up a cell because one part failed. The rank fails where that part has no other source."""
        filling = rank.cells[cell].filling
        rank = self._given_up(
            rank if overdue else self._ended(rank, cell, part),
            cell,
            filling if overdue else filling.done(part),
        )
        assert rank.protocol_state is not None
        if not self.size.turns:
            return rank
        return rank._replace(protocol_state=staged(rank.protocol_state, failed=True))

    def _given_up(self, rank: Rank, cell: int, filling: Filling) -> Rank:
        filling = filling.stopped()
        event = self.given_up(rank.cells[cell].use, filling)
        rank = _with(rank, cell, rank.cells[cell]._replace(filling=filling))
        return self._used(rank, cell, event)

    def _moved(self, rank: Rank, cell: int, filling: Filling) -> Rank:
        """Let a cell follow one of its parts."""
        rank = _with(rank, cell, rank.cells[cell]._replace(filling=filling))
        event = self.after_part(rank.cells[cell].use, filling)
        return rank if event is None else self._used(rank, cell, event)

    def _ended(self, rank: Rank, cell: int, part: int) -> Rank:
        """End the transfers of one part."""
        return rank._replace(
            flows=tuple(flow for flow in rank.flows if (flow.cell, flow.part) != (cell, part))
        )

    # --- the flip ---

    def _adopted(self, rank: Rank, protocol_state: ProtocolState, readers: Sequence[int]) -> Rank:
        """Drain the old cell; without readers it is free at once. Keep it if the new epoch needs no other."""
        swap = {Cell.LIVE: CellEvent.EVICTED, Cell.STAGED: CellEvent.ADOPTED}
        keeps = not any(record.use is Cell.STAGED for record in rank.cells)
        for cell, record in enumerate(rank.cells):
            if keeps and record.use is Cell.LIVE:
                rank = _with(rank, cell, record._replace(epoch=rank.steps))
            elif record.use in swap:
                rank = self._used(rank, cell, swap[record.use])
        rank = self._telling(
            rank._replace(protocol_state=flipped(protocol_state)), FLIPPED, protocol_state.handover
        )
        for cell, record in enumerate(rank.cells):
            if record.use is Cell.DRAINING and self.drained(readers, cell):
                rank = self._used(rank, cell, CellEvent.SETTLED)
        return rank

    def _telling(self, rank: Rank, fact: int, handover: int) -> Rank:
        return rank._replace(said=rank.said | fact_of(fact, handover))

    def _used(self, rank: Rank, cell: int, event: CellEvent) -> Rank:
        record = rank.cells[cell]
        after = self.cell_after(record.use, event)
        if after is Cell.FREE:
            return _with(rank, cell, CellRecord(after))
        if after is Cell.QUARANTINED:
            return _with(rank, cell, CellRecord(after, filling=record.filling))
        return _with(rank, cell, record._replace(use=after))


def _with(rank: Rank, cell: int, record: CellRecord) -> Rank:
    return rank._replace(cells=(*rank.cells[:cell], record, *rank.cells[cell + 1 :]))
