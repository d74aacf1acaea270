"""Draw the handover's tables into docs/handover.md, between the markers there: python docs/make_diagrams.py

Each diagram is generated from its table in `fleet.handover` alone, so that the page cannot contradict the
code.
"""

import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "handover.md"
sys.path.insert(0, str(PAGE.parents[1]))

from fleet.handover import (  # noqa: E402 the repository need not be installed
    CELL,
    CONDUCTING,
    RANK,
    REARRANGING,
    Cell,
    CoordinatorState,
    RankState,
)

TABLES: dict[str, tuple[Mapping[tuple[Any, Any], Any], StrEnum]] = {
    "coordinator": (CONDUCTING, CoordinatorState.IDLE),
    "rank": (RANK, RankState.SERVING),
    "rearranging": (REARRANGING, RankState.SERVING),
    "cell": (CELL, Cell.FREE),
}
"""Table and initial state, by marker."""
_PART = re.compile(r"<!-- diagram: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def diagram(table: Mapping[tuple[Any, Any], Any], first: StrEnum) -> str:
    """Return a table as a Mermaid state diagram. Transitions between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in table.items():
        arrows.setdefault((state.value, after.value), []).append(event.value)
    lines = [f"    {of} --> {to}: {', '.join(events)}" for (of, to), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}", *lines, "```"])


def drawn(page: str) -> str:
    """Return a page with the diagrams of the tables between its markers.

    ValueError: a marker is missing, or names an unknown table.
    """
    named = _PART.findall(page)
    if sorted(named) != sorted(TABLES):
        raise ValueError(
            f"{PAGE.name} has markers for the diagrams {named}; it needs one each for {', '.join(TABLES)}"
        )
    return _PART.sub(
        lambda part: f"<!-- diagram: {part[1]} -->\n{diagram(*TABLES[part[1]])}\n<!-- end -->", page
    )


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
