"""Held-out documents: chosen once by licence, committed beside the model, never trained on.

Two disjoint halves. `test` documents are committed as files, so they come only from Debian packages (and the
Python standard library) under a permissive licence. `fit` documents, of the same licences, are named in the
manifest but not committed: tables are learnt from the routings recorded on them, and evaluated on routings of
the test documents.
"""

import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.demo_model import DOMAINS, heldout_path
from benchmarks.demo_model.corpus import Document, NearCopies, find_documents, middle

__all__ = ["ALLOWED_LICENCES", "choose", "read_documents", "read_manifest", "texts_not_to_train_on"]

TEST_DOCUMENTS = 8
FIT_DOCUMENTS = 8
SHORTEST_BYTES = 1_600
LONGEST_TEST_BYTES = 4_400
LONGEST_FIT_BYTES = 8_000

ALLOWED_LICENCES = frozenset(
    {
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "Artistic-1.0-Perl OR GPL-1.0-or-later",
        "BSD-3-Clause",
        "HPND",
        "MIT",
        "MIT-open-group",
        "PSF-2.0",
        "PostgreSQL",
    }
)

_TRANSLATED = {r"passwd|login": "BSD-3-Clause", r"postgresql(-client)?-\d+|libpq5": "PostgreSQL"}
_PACKAGES: dict[str, dict[str, str]] = {
    # by domain: Debian package (a pattern) -> the licence of its documents of that domain
    "c": {
        r"llvm-\d+-dev": "Apache-2.0 WITH LLVM-exception",
        r"libssl-dev": "Apache-2.0",
        r"x11proto-dev|libx11-dev|libxext-dev": "MIT",
    },
    "perl": {r"perl-modules-[\d.]+": "Artistic-1.0-Perl OR GPL-1.0-or-later"},
    "en": {r"openssl": "Apache-2.0", **_TRANSLATED},
    "de": _TRANSLATED,
    "fr": _TRANSLATED,
    "ru": _TRANSLATED,
    "ja": _TRANSLATED,
    "html": {r"nodejs|libxslt1-dev": "MIT"},
}
_NOTICES = {
    # Debian package (a pattern) -> the file in licences/ with its copyright and licence
    r"python": "Python",
    r"passwd|login": "shadow",
    r"postgresql(-client)?-\d+|libpq5": "PostgreSQL",
    r"openssl|libssl-dev": "OpenSSL",
    r"llvm-\d+-dev": "LLVM",
    r"perl-modules-[\d.]+": "Perl",
    r"nodejs": "Node.js",
    r"libxslt1-dev": "libxslt",
    r"x11proto-dev|libx11-dev|libxext-dev": "X11",
}
_GRANTS = {
    # A header or module is taken only if its text names the licence of its package.
    "c": rb"Permission is hereby granted|Permission to use, copy|Apache License",
    "perl": rb"same terms as Perl",
}
_OTHER_TERMS = {"python": rb"(?i)copyright|licen[sc]e"}
"""Pattern of licence terms; a standard library module with terms of its own is not taken."""
_PACKAGE_LISTS = Path("/var/lib/dpkg/info")


def read_manifest() -> list[dict[str, Any]]:
    """Return the manifest's entries.

    Each has part (`test` or `fit`), domain, licence, notice (its file in `licences/`), source, package, bytes
    and sha256; `test` ones also file.
    """
    entries: list[dict[str, Any]] = json.loads((heldout_path() / "manifest.json").read_text("ascii"))[
        "documents"
    ]
    return entries


def read_documents(part: str) -> list[Document]:
    """Return the documents of `part`, in the order of the manifest; `fit` ones are looked up on this machine.

    Raises:
        LookupError: a `fit` document is not on this machine, or is not the text that was chosen.
    """
    entries = [entry for entry in read_manifest() if entry["part"] == part]
    if part == "test":
        return [
            Document(entry["domain"], entry["source"], (heldout_path() / entry["file"]).read_bytes())
            for entry in entries
        ]
    found = {document.source: document for domain in DOMAINS for document in find_documents(domain)}
    return [_same_text(entry, found) for entry in entries]


def _same_text(entry: dict[str, Any], found: dict[str, Document]) -> Document:
    document = found.get(entry["source"])
    if document is not None:
        excerpt = Document(entry["domain"], entry["source"], middle(document.text, LONGEST_FIT_BYTES))
        if excerpt.digest == entry["sha256"]:
            return excerpt
    raise LookupError(
        f"{entry['source']}: this machine does not have the text that was chosen (package {entry['package']})"
    )


def texts_not_to_train_on() -> list[bytes]:
    """Return the texts of all held-out documents, in full where this machine has the document."""
    entries = read_manifest()
    sources = {entry["source"] for entry in entries}
    whole = [
        document.text
        for domain in DOMAINS
        for document in find_documents(domain)
        if document.source in sources
    ]
    return whole + [(heldout_path() / entry["file"]).read_bytes() for entry in entries if "file" in entry]


def choose(seed: int) -> Iterator[tuple[str, str, str, Document]]:
    """Yield (part, licence, package, excerpt) for the documents of each domain, chosen at random among the
    permissive ones."""
    packages = _owners()
    for domain in DOMAINS:
        chosen = NearCopies()
        taken = 0
        for document in _shuffled(find_documents(domain), f"{seed} heldout {domain}"):
            package = "python" if domain == "python" else packages.get(document.source, "")
            licence = _licence(domain, package, document)
            if licence is None or len(document.text) < SHORTEST_BYTES or chosen.has(document.text):
                continue
            chosen.add(document.text)
            part, limit = (
                ("test", LONGEST_TEST_BYTES) if taken < TEST_DOCUMENTS else ("fit", LONGEST_FIT_BYTES)
            )
            yield part, licence, package, Document(domain, document.source, middle(document.text, limit))
            taken += 1
            if taken == TEST_DOCUMENTS + FIT_DOCUMENTS:
                break


def _shuffled(documents: list[Document], seed: str) -> list[Document]:
    random.Random(seed).shuffle(documents)
    return documents


def _licence(domain: str, package: str, document: Document) -> str | None:
    """Return the licence of a document, or None when it may not be committed or is not certain."""
    if domain in _OTHER_TERMS and re.search(_OTHER_TERMS[domain], document.text):
        return None
    if domain in _GRANTS and not re.search(_GRANTS[domain], document.text):
        return None
    if domain == "python":
        return "PSF-2.0"
    licence = next(
        (licence for pattern, licence in _PACKAGES[domain].items() if re.fullmatch(pattern, package)), None
    )
    if (
        package.endswith(("x11proto-dev", "libx11-dev", "libxext-dev"))
        and b"hereby granted, free of charge" not in document.text
    ):
        return "MIT-open-group" if b"Open Group" in document.text else "HPND"
    return licence


def _owners() -> dict[str, str]:
    """Return the owning Debian package of every file in packages with a known licence."""
    owners: dict[str, str] = {}
    for listing in sorted(_PACKAGE_LISTS.glob("*.list")):
        package = listing.name.removesuffix(".list").split(":")[0]
        if any(re.fullmatch(pattern, package) for patterns in _PACKAGES.values() for pattern in patterns):
            owners.update(dict.fromkeys(listing.read_text("utf-8").splitlines(), package))
    return owners


def _write(chosen: Iterable[tuple[str, str, str, Document]], folder: Path) -> None:
    entries: list[dict[str, Any]] = []
    for part, licence, package, document in chosen:
        entry = {
            "part": part,
            "domain": document.domain,
            "licence": licence,
            "notice": next(notice for pattern, notice in _NOTICES.items() if re.fullmatch(pattern, package)),
            "source": document.source,
            "package": package,
            "bytes": len(document.text),
            "sha256": document.digest,
        }
        if part == "test":
            name = Path(document.source).name.removesuffix(".gz").removesuffix(".mo").lower()
            file = f"{document.domain}/{re.sub(r'[^a-z0-9]+', '-', name)}.txt"
            entry = {"file": file, **entry}
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(document.text)
        entries.append(entry)
    (folder / "manifest.json").write_text(
        json.dumps({"documents": entries}, indent=1) + "\n", encoding="ascii"
    )


def main(seed: Annotated[int, typer.Option(help="Seed of the choice of documents.")] = 0) -> None:
    """Choose the held-out documents anew from this machine and write them with their manifest. Invalidates
    model and routings."""
    chosen = list(choose(seed))
    for domain in DOMAINS:
        shutil.rmtree(heldout_path() / domain, ignore_errors=True)
    heldout_path().mkdir(exist_ok=True)
    _write(chosen, heldout_path())
    for domain in DOMAINS:
        counts = [
            sum(part == half and document.domain == domain for part, _, _, document in chosen)
            for half in ("test", "fit")
        ]
        typer.echo(f"{domain}: {counts[0]} test and {counts[1]} fit documents")


if __name__ == "__main__":
    typer.run(main)
