"""Room that a switch of attention needs, and its refusals in words.

A switch is done in place: units of the old layout stay until all reads are done. A rank has U units. With n
held pages on each of P ranks under data-parallel attention, a rank holds n * G units and needs one more for
each of the (P - 1) * n pages of the others. Under tensor-parallel attention it holds P * n units and needs G
- 1 more for each of the n pages that it gets. Both amount to n * (P + G - 1) <= U. So the held part f = n * G
/ U is limited by f * (1 + (P - 1) / G) <= 1 (`fleet.layout.held_limit`).
"""

from engine_adapter.kv_switch.kv_state import SwitchRefused

REMEDY = "wait for requests to finish, cancel some, or let the switch preempt the latest"


def capacity(ranks: int, groups: int, units: int) -> int:
    """Return the number of pages that requests may hold for each rank, spread evenly and none shared, in a
    switch in either direction. units: of a rank, for both its held and its free pages."""
    return units // (ranks + groups - 1)


def check_length(known: int, room: int) -> None:
    """SwitchRefused when a rank can never serve a request of this many tokens, prompt and answer. room:
    tokens that fit one rank."""
    if known > room:
        raise SwitchRefused(
            f"switch to data-parallel attention: an open request may grow to {known} tokens, and a rank has"
            f" room for {room}; wait until it finishes or cancel it"
        )
