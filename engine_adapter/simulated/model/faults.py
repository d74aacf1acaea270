"""Faults injected into a simulated engine, and their duration. Pure: time is an argument."""

from dataclasses import dataclass

import msgspec

KINDS = {
    "die": "the engine is gone as by kill -9: connections break without notice",
    "stall": "steps stop; requests are still accepted, and hang",
    "refuse": "a share of the requests is rejected as overload (503)",
    "error": "a share of the requests fails before the first token (500)",
    "break_stream": "the connection of a share of the requests breaks in the middle of the answer",
    "slow": "a rank needs `factor` times as long for a step, and the others wait for it",
    "lie_load": "load is reported `factor` times what it is",
    "lose_kv_events": "a share of the KV events is never reported",
    "slow_reads": "a rank needs `factor` times as long to read an expert from another",
    "break_reads": "a share of a rank's reads fails, as if the other rank were gone",
    "corrupt_reads": "a share of the experts that a rank reads arrives damaged",
    "handover": "steps stop for `seconds`, and heartbeats announce the remaining time",
    "heal": "all faults end",
}
_FACTORS = {"slow": 10.0, "lie_load": 0.0, "slow_reads": 1000.0}
_ENGINE_WIDE = ("die", "stall", "handover")


class FaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /simulate`."""

    fault: str
    rank: int | None = None
    """None: every rank."""
    seconds: float | None = None
    """Duration. None: until `heal`."""
    share: float = 1.0
    factor: float | None = None
    """Factor of `slow` (default 10), `lie_load` (default 0, an idle rank) and `slow_reads` (default 1000)."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that lasts until a time of the engine's clock."""

    kind: str
    rank: int | None
    until: float
    share: float
    factor: float


class Faults:
    """Faults of one engine."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._active: list[InjectedFault] = []

    def order(self, order: FaultOrder, now: float) -> None:
        """Start a fault. It replaces an earlier one of the same kind and rank. ValueError states what is
        wrong with the order."""
        self.check(order)
        if order.fault == "heal":
            self._active.clear()
            return
        until = float("inf") if order.seconds is None else now + order.seconds
        factor = _FACTORS.get(order.fault, 1.0) if order.factor is None else order.factor
        same = [one for one in self._active if (one.kind, one.rank) != (order.fault, order.rank)]
        self._active = [*same, InjectedFault(order.fault, order.rank, until, order.share, factor)]

    def check(self, order: FaultOrder) -> None:
        """ValueError unless the order can be executed."""
        _need(order.fault in KINDS, "fault", order.fault, f"use one of {', '.join(KINDS)}")
        _need(
            order.rank is None or 0 <= order.rank < self._ranks,
            "rank",
            order.rank,
            f"ranks run from 0 to {self._ranks - 1}",
        )
        _need(
            order.rank is None or order.fault not in _ENGINE_WIDE,
            "rank",
            order.rank,
            f"{order.fault} affects the whole engine: its ranks step together",
        )
        _need(
            order.seconds is None or 0 < order.seconds < float("inf"),
            "seconds",
            order.seconds,
            "use a positive number, or leave it out to last until heal",
        )
        _need(
            order.seconds is not None or order.fault != "handover",
            "seconds",
            None,
            "a handover has to announce its duration",
        )
        _need(0 <= order.share <= 1, "share", order.share, "use 0 to 1")
        _need(
            order.factor is None or 0 <= order.factor < float("inf"), "factor", order.factor, "use 0 or more"
        )
        _need(
            order.factor is None or order.fault in _FACTORS,
            "factor",
            order.factor,
            f"only {', '.join(_FACTORS)} have one",
        )

    def active(self, now: float) -> list[InjectedFault]:
        """Faults that still last."""
        self._active = [one for one in self._active if one.until > now]
        return self._active

    def share(self, kind: str, rank: int, now: float) -> float:
        """Share of a rank's requests or events that this kind of fault affects, in [0, 1]."""
        return max((one.share for one in self._at(kind, rank, now)), default=0.0)

    def factor(self, kind: str, rank: int, now: float) -> float:
        """Multiplier of a rank's step times, load reports or read times."""
        found = self._at(kind, rank, now)
        return found[-1].factor if found else 1.0

    def held_until(self, now: float) -> float:
        """Time before which no step ends. `now` when no fault blocks steps."""
        return max((one.until for one in self.active(now) if one.kind in ("stall", "handover")), default=now)

    def handover_left(self, now: float) -> float:
        """Seconds until the handover in progress ends. 0: there is none."""
        return max((one.until - now for one in self.active(now) if one.kind == "handover"), default=0.0)

    def _at(self, kind: str, rank: int, now: float) -> list[InjectedFault]:
        return (
            [one for one in self.active(now) if one.kind == kind and one.rank in (None, rank)]
            if self._active
            else []
        )


def _need(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{key} = {value!r}: {remedy}")
