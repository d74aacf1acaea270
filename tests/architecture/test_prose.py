"""The check of plain English and links finds what it is meant to find, and only that."""

from pathlib import Path

import pytest

from docs import check_prose


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('"""What a rank holds."""', "not with 'What'"),
        ('"""Ranks."""\n\n\ndef f():\n    """Whether it runs."""', "not with 'Whether'"),
        ('"""Ranks."""\n\nMOST = 1\n"""of them, by itself"""', "'by itself': say automatically"),
        ('"""Ranks."""\n\noption(help="Somebody asks.")', "'Somebody'"),
    ],
)
def test_code_that_is_hard_to_read_is_found(tmp_path: Path, code: str, problem: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert [problem in found.problem for found in check_prose.in_code(tmp_path / "module.py")] == [True]


def test_help_texts_of_metrics_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text(
        '"""Metrics."""\n\nself._tally("plans", "Plans that nobody asked for", "model")'
    )
    (found,) = check_prose.in_code(tmp_path / "metrics.py")
    assert (found.line, found.problem) == (3, "'nobody': say name the actor")


@pytest.mark.parametrize(
    "code", ['"""Whatever is fine, and `nobody` in code."""', '"""Plans."""\n\ntext = "nobody"']
)
def test_code_and_longer_words_are_let_be(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(check_prose.in_code(tmp_path / "module.py")) == []


def test_dead_links_and_anchors_are_found_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# Here, there\n## `roost up` & more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](there.md#here-there) [b](https://x.org)"
        " [c](#top)\n[d](there.md#roost-up--more)\n[e](gone.md)\n[f](there.md#gone)\n`[g](gone.md)`\n"
    )
    assert [(found.line, found.problem) for found in check_prose.in_page(page)] == [
        (4, "dead link: gone.md"),
        (5, "dead link: there.md has no heading for #gone"),
    ]
