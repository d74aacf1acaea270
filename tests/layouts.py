"""How an engine states its layout: attention beside and in its placement, and sharded layers in it."""

from typing import Any

import msgspec

from fleet.layout import AttentionLayout, Layout
from fleet.placement import Placement, PlacementRecord, with_rows


def stated(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a join with `layout`, a Layout or None, replaced by what states it."""
    layout: Layout | None = fields["layout"]
    rest = {name: value for name, value in fields.items() if name != "layout"}
    if layout is None:
        return {**rest, "attention": None}
    record: PlacementRecord | None = fields.get("placement")
    if record is not None and layout.sharded:
        whole = Placement.from_record(record)
        rest["placement"] = with_rows(whole, dict.fromkeys(layout.sharded), epoch=whole.epoch).record()
    if rest.get("placement") is not None and layout.attention == "tp":
        rest["placement"] = msgspec.structs.replace(rest["placement"], attention="tp")
    return {**rest, "attention": AttentionLayout(kind=layout.attention)}
