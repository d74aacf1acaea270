"""Handover state of one worker: the map in force, the map that is held, and the number up to which all is
past. Pure: messages in, `MapStatus` out. The caller holds a lock, over a vote and what follows from it
too."""

from dataclasses import dataclass

from roost_vllm.maps import MapRejected, Table, checked_map
from roost_vllm.wire import DropMap, MapStatus, PermitVote, StageMap, WorkerState, map_digest


@dataclass(frozen=True)
class HeldMap:
    """A validated map, and the handover that brought it."""

    handover: int
    epoch: int
    digest: str
    table: Table


class Mailbox:
    """Map in force and map that is held.

    table, served: the map in force and its digest. flipped: the handover that brought it (0: none). epoch:
    its epoch (0: the agent never named one). refusal: why no map is taken (empty: maps are taken)."""

    def __init__(self, table: Table, experts: int, refusal: str = "") -> None:
        self.table = table
        self.experts = experts
        self.refusal = refusal
        self.served = map_digest(table, experts)
        self.flipped = 0
        self.epoch = 0
        self.layers_done = 0
        self.has_passed = False
        """the map that is held passed the vote, and is not yet in force in all layers"""
        self._state: WorkerState = "idle"
        self.held: HeldMap | None = None
        """the map that is held, until it is in force"""
        self._handover = 0
        self._past = 0
        """highest number that was held, rejected, dropped or carried out"""
        self._reason = ""

    def status(self) -> MapStatus:
        """Return the state."""
        return MapStatus(
            state=self._state,
            handover=self._handover,
            digest=self.held.digest if self.held else "",
            served=self.served,
            flipped=self.flipped,
            epoch=self.epoch,
            reason=self._reason,
            layers_done=self.layers_done,
        )

    def stage(self, message: StageMap) -> MapStatus:
        """Hold a map, in place of one that is held and not voted for. A number that is past changes
        nothing."""
        if message.handover <= self._past or self._state == "voting":
            return self.status()
        self._past = message.handover
        try:
            held = self._checked(message)
        except MapRejected as rejection:
            self._set("idle", message.handover, str(rejection))
        else:
            self._set("staged", message.handover, "")
            self.held = held
        return self.status()

    def _checked(self, message: StageMap) -> HeldMap:
        if self.refusal:
            raise MapRejected(self.refusal)
        if message.replaces != self.served:
            raise MapRejected(f"stale map: made for {message.replaces or 'none'}, in force is {self.served}")
        if message.epoch <= self.epoch:
            raise MapRejected(f"stale epoch: {message.epoch} is not above {self.epoch}, which is in force")
        layers, slots = self.table.shape
        table = checked_map(message.map, layers=layers, slots=slots, experts=self.experts)
        return HeldMap(message.handover, message.epoch, map_digest(table, self.experts), table)

    def permit(self, message: PermitVote) -> MapStatus:
        """Vote for the map that is held. Another number changes nothing."""
        if self._state == "staged" and self._handover == message.handover:
            self._state = "voting"
        return self.status()

    def drop(self, message: DropMap) -> MapStatus:
        """Drop the map that is held, unless its vote has passed. Its number is past from then on."""
        number = message.handover
        if self.has_passed or number < self._handover or number == self.flipped:
            return self.status()
        if number == self._handover and self.held is not None:
            self._let_go(message.reason)
        elif number > self._handover and self._state != "voting":
            self._set("idle", number, message.reason)
        self._past = max(self._past, number)
        return self.status()

    def let_go(self, reason: str) -> None:
        """Drop the map that is held, if one is, for a reason of the worker's own."""
        if self.held is not None and not self.has_passed:
            self._let_go(reason)

    def proposal(self) -> HeldMap | None:
        """Return the map that this worker votes for."""
        return self.held if self._state == "voting" and not self.has_passed else None

    def pass_vote(self) -> HeldMap:
        """Note that all ranks voted for the map that is held, and return it. Nothing aborts from then on."""
        held = self.proposal()
        if held is None:
            raise RuntimeError("a vote passed for a map that this worker did not vote for")
        self.has_passed = True
        self.layers_done = 0
        return held

    def come_into_force(self, table: Table) -> None:
        """Note the map that vLLM serves after it has carried out the vote."""
        held = self.held
        if held is None or not self.has_passed:
            raise RuntimeError("a map came into force that was not voted for")
        self.has_passed = False
        digest = map_digest(table, self.experts)
        if digest == held.digest:
            self._set("idle", held.handover, "")
            self._serve(table, held.handover, held.epoch)
            return
        self._set("refused", held.handover, f"vLLM did not carry the map out: it serves {digest}")
        if digest != self.served:
            self._serve(table, 0, 0)

    def replaced_by_vllm(self, table: Table) -> None:
        """Note a map that vLLM's own policy chose. A map that is held was made for the old one: dropped."""
        self.let_go("vLLM's own policy rearranged the experts")
        self._serve(table, 0, 0)

    def _serve(self, table: Table, handover: int, epoch: int) -> None:
        self.table, self.served = table, map_digest(table, self.experts)
        self.flipped, self.epoch = handover, epoch
        self.layers_done = len(table)

    def _let_go(self, reason: str) -> None:
        self._set("refused" if self._state == "voting" else "idle", self._handover, reason)

    def _set(self, state: WorkerState, handover: int, reason: str) -> None:
        self._state, self._handover, self._reason, self.held = state, handover, reason, None
