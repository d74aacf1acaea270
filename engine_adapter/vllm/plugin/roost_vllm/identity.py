"""Facts of a worker that never change while it lives."""

import os
from dataclasses import dataclass

from roost_vllm import __version__
from roost_vllm.mailbox import Mailbox
from roost_vllm.wire import PROTOCOL, WorkerHello


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Facts of this worker; see `wire.WorkerHello`."""

    missing: tuple[str, ...]
    engine: str
    instance: str
    rank: int
    ranks: int
    target: int
    targets: int
    model: str
    layers: int
    experts: int
    slots: int
    top_k: int
    expert_bytes: int
    all2all: str
    dtype: str
    quantisation: str
    asynchronous: bool
    sees_all: bool
    """this rank counts the tokens of all ranks"""
    tells_demand: bool
    """no lower rank of its target counts the same tokens"""

    @property
    def own(self) -> slice:
        """Slots of this rank among those of all ranks."""
        return slice(self.rank * self.slots, (self.rank + 1) * self.slots)

    def hello(self, mailbox: Mailbox, *, proof: bytes, nonce: bytes) -> WorkerHello:
        """Return the introduction, with the state of the handover."""
        status = mailbox.status()
        return WorkerHello(
            protocol=PROTOCOL,
            proof=proof,
            nonce=nonce,
            plugin=__version__,
            engine=self.engine,
            missing=self.missing,
            refuses=mailbox.refusal,
            instance=self.instance,
            pid=os.getpid(),
            rank=self.rank,
            ranks=self.ranks,
            target=self.target,
            targets=self.targets,
            model=self.model,
            layers=self.layers,
            experts=self.experts,
            slots=self.slots,
            top_k=self.top_k,
            expert_bytes=self.expert_bytes,
            all2all=self.all2all,
            dtype=self.dtype,
            quantisation=self.quantisation,
            asynchronous=self.asynchronous,
            map=mailbox.table.astype("<i2").tobytes(),
            state=status.state,
            handover=status.handover,
            flipped=status.flipped,
            epoch=status.epoch,
        )
