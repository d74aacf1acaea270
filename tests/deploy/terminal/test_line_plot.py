"""Curves as text."""

from deploy.terminal.line_plot import HEIGHT, WIDTH, line_plot


def test_curves_have_their_letters_and_meet_in_stars() -> None:
    lines = line_plot(
        {"A": [(1, 1), (100, 100)], "B": [(1, 100), (100, 1), (10, 50)], "C": [(10, 50)]},
        horizontal="x", vertical="y",
    )  # fmt: skip
    rows = lines[1 : HEIGHT + 1]
    assert (lines[0], lines[-1]) == ("y", "x")
    assert rows[0].startswith("100 |B")
    assert rows[0].endswith("A")
    assert rows[-1].startswith("  1 |A")
    assert rows[-1].endswith("B")
    assert "".join(rows).count("*") == 1
    assert max(map(len, rows)) == 5 + WIDTH


def test_a_single_point_is_drawn() -> None:
    assert any("A" in line for line in line_plot({"A": [(3, 3)]}, horizontal="x", vertical="y"))
