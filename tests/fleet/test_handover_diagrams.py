"""The page about handovers matches the tables."""

import re

import pytest

from docs.make_diagrams import PAGE, TABLES, diagram, drawn
from fleet.handover import CELL, Cell


def test_the_diagrams_on_the_page_are_those_of_the_tables() -> None:
    page = PAGE.read_text()
    assert page == drawn(page), (
        f"the tables have changed: run python docs/make_diagrams.py, which rewrites docs/{PAGE.name}"
    )


def test_a_diagram_has_every_move_of_its_table_and_nothing_else() -> None:
    lines = re.findall(r"^    (\w+) --> (\w+): (.+)$", diagram(CELL, Cell.FREE), re.MULTILINE)
    found = {(of, event, to) for of, to, events in lines for event in events.split(", ")}
    assert found == {(of.value, event.value, to.value) for (of, event), to in CELL.items()}


def test_a_page_that_lacks_a_diagram_is_refused() -> None:
    with pytest.raises(ValueError, match="it needs one each for coordinator, rank, rearranging, cell"):
        drawn(PAGE.read_text().replace("<!-- diagram: rank -->", ""))
    assert set(TABLES) == {"coordinator", "rank", "rearranging", "cell"}
