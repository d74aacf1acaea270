"""Check that Roost's English is plain and that its links lead somewhere: python docs/check_prose.py

Looks at the docstrings of the product, the help texts of its commands and metrics, and the Markdown pages.
Prints one line per finding and exits with 1 when there is any. `make lint` runs it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fleet", "bus", "tracker", "router", "migration", "engine_adapter", "client", "deploy")
PAGES = ("*.md", "docs/*.md", "docs/decisions/*.md", "docs/guides/*.md")
QUOTES_OLD_WORDS = {ROOT / "docs/renamed.md"}

BANNED = {
    "foretold": "predicted",
    "foretell": "predict",
    "foretells": "predicts",
    "foretelling": "predicting",
    "heed": "follow",
    "heeds": "follows",
    "heeded": "followed",
    "somebody": "name the actor",
    "anybody": "name the actor",
    "nobody": "name the actor",
    "whoever": "name the actor",
    "so many": "a number, or 'that many'",
    "so long": "a duration",
    "goes on": "continues",
    "no more": "stops, or 'no longer'",
    "by itself": "automatically",
    "by themselves": "automatically",
}
"""phrase -> what to say instead"""
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
_START = re.compile(r"(What|Which|Whether|Who|Whose|Whom|Where|When|How)\b")
_CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


class Finding(NamedTuple):
    """A line of a file, and what is wrong with it."""

    file: Path
    line: int
    problem: str


def texts(tree: ast.Module, *, is_metrics: bool) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and True for the docstring of a module, class or function. is_metrics: every sentence in
    the file is a help text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for at, child in enumerate(node.body):
                if (
                    isinstance(child, ast.Expr)
                    and isinstance(child.value, ast.Constant)
                    and isinstance(child.value.value, str)
                ):
                    yield child.lineno, child.value.value, at == 0
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value), False
        elif is_metrics and isinstance(node, ast.Call):
            for given in node.args:
                if isinstance(given, ast.Constant) and isinstance(given.value, str) and " " in given.value:
                    yield given.lineno, given.value, False


def in_code(path: Path) -> Iterator[Finding]:
    """Findings in one Python file."""
    for line, text, is_docstring in texts(ast.parse(path.read_text()), is_metrics=path.stem == "metrics"):
        yield from banned(path, line, _without_code(text))
        start = _START.match(text)
        if is_docstring and start is not None:
            yield Finding(
                path, line, f"a docstring begins with a verb or a noun phrase, not with {start[1]!r}"
            )


def banned(path: Path, line: int, text: str) -> Iterator[Finding]:
    """Phrases that are not said; line: of the text's beginning."""
    for found in _BANNED.finditer(text):
        yield Finding(
            path, line + text.count("\n", 0, found.start()), f"{found[0]!r}: say {BANNED[found[0].lower()]}"
        )


def _without_code(text: str) -> str:
    """The same with code blanked out; lines stay where they are."""
    return _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def in_page(path: Path) -> Iterator[Finding]:
    """Findings in one Markdown page."""
    text = path.read_text()
    prose = _without_code(text)
    if path not in QUOTES_OLD_WORDS:
        yield from banned(path, 1, prose)
    for link in _LINK.finditer(prose):
        target, _, anchor = link[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        line, file = (
            1 + prose.count("\n", 0, link.start()),
            (path.parent / target).resolve() if target else path,
        )
        if not file.exists():
            yield Finding(path, line, f"dead link: {link[1]}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield Finding(path, line, f"dead link: {file.name} has no heading for #{anchor}")


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def findings() -> list[Finding]:
    """All findings, by file and line."""
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    return sorted(
        [found for path in code for found in in_code(path)]
        + [found for page in pages for found in in_page(page)]
    )


def main() -> None:
    """Print the findings; exit status 1 when there are any."""
    found = findings()
    for file, line, problem in found:
        print(f"{file.relative_to(ROOT)}:{line}: {problem}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
