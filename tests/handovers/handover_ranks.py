"""Steps of the model's ranks, each on its own: receive commands, read, verify, adopt. See
`handover_model`."""

from collections.abc import Iterator

from fleet.handover import (
    Cell,
    CellEvent,
    CommandVerdict,
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
    Own,
    Rank,
    Rules,
    Size,
    fact_of,
)


class Ranks(Rules):
    """Steps of a rank. offer: the readable (cell, epoch) of the rank before it; (-1, -1): none, it is
    dead."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def born(self, epoch: int, made: int, said: int) -> Rank:
        cells = ((Cell.LIVE, epoch), *[(Cell.FREE, 0)] * (self.size.cells - 1))
        return Rank(ProtocolState(RankState.SERVING, epoch), epoch, made, cells, (), said)

    def obeyed(
        self, rank: Rank, kind: int, token: int, handover: int, epoch: int, offer: tuple[int, int]
    ) -> Rank:
        protocol_state = rank.protocol_state
        assert protocol_state is not None
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
            return self._reading(
                rank._replace(protocol_state=proposed(protocol_state, token, handover)), offer
            )
        if kind == COMMIT:
            return rank._replace(protocol_state=committed(protocol_state, token))
        return (self.dropped(rank) if handover == protocol_state.handover else rank)._replace(
            protocol_state=aborted(protocol_state, token, handover)
        )

    def dropped(self, rank: Rank) -> Rank:
        given_up = {
            Cell.PULLING: CellEvent.OVERDUE,
            Cell.VERIFYING: CellEvent.OVERDUE,
            Cell.STAGED: CellEvent.DROPPED,
        }
        cells = tuple(
            (self.cell_after(use, given_up[use]), 0) if use in given_up else (use, epoch)
            for use, epoch in rank.cells
        )
        return rank._replace(cells=cells)

    def own(
        self, rank: Rank, protocol_state: ProtocolState, offer: tuple[int, int], readers: int
    ) -> Iterator[Own]:
        if protocol_state.state is RankState.READY and rank.steps > protocol_state.served:
            yield Own(
                Kind.DUE,
                "the agent of rank {} hears that it flipped: the old cell drains",
                self._adopted(rank, protocol_state, readers),
            )
        if protocol_state.state is RankState.STAGED:
            alone = self.gives_up(rank, protocol_state)
            if alone is not None:
                yield Own(Kind.MAY, "rank {} has waited long enough, and gives up", alone)
        if protocol_state.state is RankState.STAGING and not any(
            use in (Cell.PULLING, Cell.VERIFYING) for use, _ in rank.cells
        ):
            yield from self._beginning(rank, protocol_state, offer)
        for cell, (use, _) in enumerate(rank.cells):
            yield from self._transferring(rank, protocol_state, cell, use, alive=offer[0] >= 0)
            if use is Cell.DRAINING and self.drained(readers, cell):
                yield Own(
                    Kind.DUE,
                    f"nobody reads cell {cell} of rank {{}} any more: it is free",
                    self._used(rank, cell, CellEvent.SETTLED),
                )

    def _beginning(self, rank: Rank, protocol_state: ProtocolState, offer: tuple[int, int]) -> Iterator[Own]:
        uses = [use for use, _ in rank.cells]
        reading = self._reading(rank, offer)
        if reading is not rank:
            yield Own(Kind.DUE, "rank {} tries again, and reads its expert of rank {}", reading)
        if reading is rank or Cell.QUARANTINED in uses:
            yield Own(
                Kind.DUE,
                "rank {} cannot stage, and says so",
                rank._replace(protocol_state=staged(protocol_state, failed=True)),
            )

    def _reading(self, rank: Rank, offer: tuple[int, int]) -> Rank:
        """Start to read if source and a free cell exist; otherwise unchanged."""
        rank = self.with_room(rank)
        uses = [use for use, _ in rank.cells]
        assert rank.protocol_state is not None
        if Cell.FREE not in uses or offer[1] != rank.protocol_state.served:
            return rank
        cell = uses.index(Cell.FREE)
        return self._used(rank, cell, CellEvent.RESERVED, rank.protocol_state.served + 1)._replace(
            flows=(*rank.flows, (cell, offer[0]))
        )

    def _transferring(
        self, rank: Rank, protocol_state: ProtocolState, cell: int, use: Cell, *, alive: bool
    ) -> Iterator[Own]:
        under_way = any(here == cell for here, _ in rank.flows)
        settled = rank._replace(flows=tuple(flow for flow in rank.flows if flow[0] != cell))
        match use:
            case Cell.PULLING if alive:
                landed = self._used(settled, cell, CellEvent.LANDED)
                if self.size.verified_at_once:
                    yield from self._transferring(landed, protocol_state, cell, Cell.VERIFYING, alive=True)
                else:
                    yield Own(Kind.DUE, f"all bytes have landed in cell {cell} of rank {{}}", landed)
                overdue = self._used(rank, cell, CellEvent.OVERDUE)
                yield Own(
                    Kind.FAULT,
                    f"the read into cell {cell} of rank {{}} is overdue, and given up",
                    overdue,
                    "overdue",
                )
            case Cell.PULLING:
                yield Own(
                    Kind.DUE,
                    f"the read into cell {cell} of rank {{}} breaks",
                    self._used(settled, cell, CellEvent.BROKEN),
                )
            case Cell.VERIFYING:
                verified = self._used(rank, cell, CellEvent.VERIFIED)._replace(
                    protocol_state=staged(protocol_state)
                )
                yield Own(
                    Kind.DUE,
                    f"rank {{}} has verified cell {cell}, and says that it has staged",
                    self._telling(verified, STAGED, protocol_state.handover),
                )
                refused = self._used(rank, cell, CellEvent.REFUSED)
                yield Own(
                    Kind.FAULT,
                    f"the checksums of cell {cell} of rank {{}} are not those promised",
                    refused,
                    "corrupted",
                )
            case Cell.QUARANTINED:
                yield Own(
                    Kind.DUE,
                    f"nothing lands any more in cell {cell} of rank {{}}",
                    self._used(settled, cell, CellEvent.SETTLED),
                )
            case _ if under_way:
                yield Own(Kind.DUE, f"nothing lands any more in cell {cell} of rank {{}}", settled)

    def _adopted(self, rank: Rank, protocol_state: ProtocolState, readers: int) -> Rank:
        """Drain the old cell; without readers it is free at once."""
        swap = {Cell.LIVE: CellEvent.EVICTED, Cell.STAGED: CellEvent.ADOPTED}
        cells = tuple(
            (self.cell_after(use, swap[use]), epoch) if use in swap else (use, epoch)
            for use, epoch in rank.cells
        )
        rank = self._telling(
            rank._replace(protocol_state=flipped(protocol_state), cells=cells),
            FLIPPED,
            protocol_state.handover,
        )
        for cell, (use, _) in enumerate(cells):
            if use is Cell.DRAINING and self.drained(readers, cell):
                rank = self._used(rank, cell, CellEvent.SETTLED)
        return rank

    def _telling(self, rank: Rank, fact: int, handover: int) -> Rank:
        return rank._replace(said=rank.said | fact_of(fact, handover))

    def _used(self, rank: Rank, cell: int, event: CellEvent, epoch: int | None = None) -> Rank:
        use, of = rank.cells[cell]
        after = self.cell_after(use, event)
        kept = 0 if after is Cell.FREE else of if epoch is None else epoch
        return rank._replace(cells=(*rank.cells[:cell], (after, kept), *rank.cells[cell + 1 :]))
