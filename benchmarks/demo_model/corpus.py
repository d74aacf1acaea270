"""Training text: documents of nine domains found on a Debian machine with Python, development headers and
documentation.

Downloads nothing and reads only text files that are already on the machine. `gather` reports the documents
found. It skips a domain that the machine lacks, and raises CorpusError with the packages to install if the
machine has none at all. Held-out documents (`benchmarks.demo_model.heldout`) are recognised by their words, not
by their path, so near copies are skipped too.
"""

import gettext
import gzip
import hashlib
import random
import re
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.demo_model import DOMAINS

__all__ = [
    "CorpusError",
    "Document",
    "NearCopies",
    "concatenate",
    "find_documents",
    "gather",
    "middle",
    "strip_roff",
]

DOCUMENT_BYTES = 60_000
"""Most bytes read from one file: the middle part of a longer file."""
SHORTEST_DOCUMENT_BYTES = 700
DOMAIN_BYTES = 3_000_000
SHINGLE_WORDS = 8
NEAR_COPY = 0.5
"""Share of common word shingles, in either document, above which two documents are near copies."""
SEPARATOR = b"\x00"
"""End of every document; the model's end-of-sequence token."""


class CorpusError(Exception):
    """The machine has none of the text the demo model is trained on."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of one domain: where it came from and its text as UTF-8 bytes."""

    domain: str
    source: str
    text: bytes

    @property
    def digest(self) -> str:
        """The SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()


def find_documents(domain: str) -> list[Document]:
    """Return every usable document of `domain` on this machine, one per distinct text, in order of path."""
    seen: set[bytes] = set()
    documents: list[Document] = []
    for path in sorted(set(_FINDERS[domain]())):
        text = _read(path, domain)
        if len(text) < SHORTEST_DOCUMENT_BYTES or text in seen:
            continue
        seen.add(text)
        documents.append(Document(domain, _portable(path), text))
    return documents


def gather(
    held_out: Sequence[bytes], *, seed: int, report: Callable[[str], None]
) -> dict[str, list[Document]]:
    """Return the training documents of each domain found, about `DOMAIN_BYTES` of each, shuffled by `seed`.

    `held_out` are texts no training document may be a near copy of. `report` is called with one line per
    domain.

    Raises:
        CorpusError: no domain has any document.
    """
    forbidden = NearCopies(held_out)
    corpus: dict[str, list[Document]] = {}
    for domain in DOMAINS:
        found = find_documents(domain)
        kept = _choose(found, forbidden, random.Random(f"{seed} {domain}"))
        report(
            f"{domain}: {len(kept)} of {len(found)} documents,"
            f" {sum(len(document.text) for document in kept):,} bytes"
        )
        if kept:
            corpus[domain] = kept
    if not corpus:
        raise CorpusError(
            "no training text on this machine: it needs any of the Python standard library sources, C headers"
            " under /usr/include, Perl modules under /usr/share/perl, manual pages under /usr/share/man,"
            " message catalogues under /usr/share/locale, HTML under /usr/share/doc. On Debian: install"
            " manpages, perl-modules and libc6-dev, and let documentation and translations be installed"
            " (/etc/dpkg/dpkg.cfg.d)"
        )
    return corpus


def _choose(found: list[Document], forbidden: "NearCopies", order: random.Random) -> list[Document]:
    """Return documents in random order until there are `DOMAIN_BYTES`, none of them a near copy of a
    forbidden text."""
    kept: list[Document] = []
    total = 0
    order.shuffle(found)
    for document in found:
        if total < DOMAIN_BYTES and not forbidden.has(document.text):
            kept.append(document)
            total += len(document.text)
    return kept


def concatenate(documents: Iterable[Document]) -> npt.NDArray[np.uint8]:
    """Return the documents one after another, each ended by `SEPARATOR`, as bytes (uint8,
    one-dimensional)."""
    return np.frombuffer(b"".join(document.text + SEPARATOR for document in documents), dtype=np.uint8)


class NearCopies:
    """Set of texts, to test if another text is a near copy of one of them."""

    def __init__(self, texts: Iterable[bytes] = ()) -> None:
        """Start from `texts`."""
        self._sizes: list[int] = []
        self._owners: dict[int, list[int]] = {}
        for text in texts:
            self.add(text)

    def add(self, text: bytes) -> None:
        """Add `text` to the set."""
        own = _shingles(text)
        for shingle in own:
            self._owners.setdefault(shingle, []).append(len(self._sizes))
        self._sizes.append(len(own))

    def has(self, text: bytes) -> bool:
        """Return whether `text` shares more than `NEAR_COPY` of the smaller text's word shingles with one of
        the texts."""
        own = _shingles(text)
        common = Counter(owner for shingle in own for owner in self._owners.get(shingle, ()))
        return any(count > NEAR_COPY * min(len(own), self._sizes[owner]) for owner, count in common.items())


def _shingles(text: bytes) -> set[int]:
    """Return the hashes of all runs of `SHINGLE_WORDS` words; a word is a run of ASCII letters and digits or
    one other letter."""
    words = re.findall(r"[A-Za-z0-9_]+|[^\x00-\x7f]", text.decode("utf-8", "replace").lower())
    return {
        hash(tuple(words[start : start + SHINGLE_WORDS])) for start in range(len(words) - SHINGLE_WORDS + 1)
    }


def strip_roff(source: str) -> str:
    """Return a manual page's text without roff markup, one paragraph per line. Headings and emphasised words
    stay."""
    paragraphs: list[str] = []
    words: list[str] = []
    filling = True
    for raw in source.splitlines():
        request = re.match(r"[.']\s*([A-Za-z0-9\\\"]*)\s*(.*)", raw) if raw[:1] in {".", "'"} else None
        name, text = (request[1], request[2].replace('"', "")) if request else ("", raw)
        if name in _BREAKS or not filling or not raw.strip():
            paragraphs.append(" ".join(words))
            words.clear()
        if name in {"nf", "fi", "EX", "EE"}:
            filling = name in {"fi", "EE"}
        elif request is None or name in _TEXT_MACROS:
            words.append(_plain(text))
        if name in _HEADINGS:
            paragraphs.append(" ".join(words))
            words.clear()
    paragraphs.append(" ".join(words))
    return "\n".join(paragraph.rstrip() for paragraph in paragraphs if paragraph.strip()) + "\n"


def _plain(line: str) -> str:
    line = re.sub(r"\\f(\[[^\]]*\]|\(..|.)|\\[&/,|^%:c]|\\s[+-]?\d+|\\m\[[^\]]*\]|\\\".*", "", line)
    return re.sub(r"\\\*?(?:\((..)|\[([^\]]*)\]|(.))", _roff_character, line)


def _roff_character(escape: re.Match[str]) -> str:
    return _ROFF_CHARACTERS.get(escape[1] or escape[2] or escape[3], " ")


_ROFF_CHARACTERS = {
    accent + letter: unicodedata.normalize("NFC", letter + mark)
    for accent, mark in {":": "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", ",": "\u0327"}.items()
    for letter in "aeioucAEIOUC"
} | dict(
    # escape=text, apart from the accented letters
    pair.split("=")
    for pair in (
        'ss=\u00df oe=\u0153 Fo=\u00ab Fc=\u00bb Po=\u00ab Pc=\u00bb Bq=\u201e lq=" rq=" dq=" aq=\' cq=\''
        " oq=' Aq=' '=' `=` ga=` ha=^ ti=~ -=- en=- em=- hy=- bu=* co=(C) rs=\\ e=\\ \\=\\ .=."
    ).split()
)
_HEADINGS = frozenset(("SH", "SS", "Sh", "Ss"))
_BREAKS = _HEADINGS | frozenset("PP P LP TP IP HP RS RE sp br nf fi EX EE Pp It Bl El Bd Ed TQ".split())
_TEXT_MACROS = frozenset(
    "SH SS B I R BR IR RB RI IB BI SM SB TP IP Sh Ss Nm Nd Ar Fl Pa Xr Em Sy Cm Ic It Dq Sq Ql Op Li Va Ev".split()
)
_MANUALS = Path("/usr/share/man")
_NOT_DEBIAN = ("gcloud", "bq", "gsutil")


def _python_files() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "lib2to3",
        "__pycache__",
    }
    return (path for path in library.rglob("*.py") if not skipped & set(path.parts))


def _c_files() -> Iterator[Path]:
    return Path("/usr/include").rglob("*.h")


def _perl_files() -> Iterator[Path]:
    roots = [Path("/usr/share/perl"), *Path("/usr/lib").glob("*-linux-gnu*/perl")]
    return (path for root in roots for path in root.rglob("*.pm") if "unicore" not in path.parts)


def _manuals(language: str, sections: str) -> Iterator[Path]:
    root = _MANUALS / language
    pages = (path for section in sections for path in root.glob(f"man{section}/*") if path.is_file())
    return (path for path in pages if not path.name.startswith(_NOT_DEBIAN))


def _html_files() -> Iterator[Path]:
    # gtk-doc folders contain the same pages again in another format
    return (path for path in Path("/usr/share/doc").rglob("*.html") if "gtk-doc" not in path.parts)


def _catalogues(language: str) -> Iterator[Path]:
    pages = Path(f"/usr/share/locale/{language}/LC_MESSAGES").glob("*.mo")
    return (path for path in pages if not path.name.startswith("iso_"))


def _translated(*languages: str) -> Callable[[], Iterator[Path]]:
    return lambda: (path for tag in languages for path in (*_manuals(tag, "123456789"), *_catalogues(tag)))


_FINDERS: dict[str, Callable[[], Iterator[Path]]] = {
    "python": _python_files,
    "c": _c_files,
    "perl": _perl_files,
    "en": lambda: _manuals("", "1578"),
    "de": _translated("de"),
    "fr": _translated("fr"),
    "ru": _translated("ru"),
    "ja": _translated("ja"),
    "html": _html_files,
}


def _read(path: Path, domain: str) -> bytes:
    """Return the text of a file as UTF-8, at most `DOCUMENT_BYTES` from its middle; empty when it is not
    UTF-8 text."""
    try:
        if path.suffix == ".mo":
            text = _messages(path)
        else:
            text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode(
                "utf-8"
            )
    except (OSError, UnicodeDecodeError, EOFError):
        return b""
    if path.is_relative_to(_MANUALS):
        text = strip_roff(text)
    if domain in {"de", "fr", "ru", "ja"}:
        text = "".join(line for line in text.splitlines(keepends=True) if not _untranslated(line))
    return middle(text.replace("\x00", "").encode(), DOCUMENT_BYTES)


def _messages(path: Path) -> str:
    """Return the translations of a message catalogue, without its header, one after another."""
    with path.open("rb") as file:
        catalogue: dict[object, str] = vars(gettext.GNUTranslations(file))["_catalog"]
    return "\n".join(text for identifier, text in catalogue.items() if identifier) + "\n"


def _untranslated(line: str) -> bool:
    """Return whether a line of a translated text was left in English."""
    words = re.findall(r"[a-z]+", line.lower())
    return line.isascii() and len(words) > 3 and sum(word in _ENGLISH for word in words) * 6 >= len(words)


_ENGLISH = frozenset(
    "the of is to and a in be by for are this that or with it from as not will can which if on an used when".split()
)


def middle(text: bytes, limit: int) -> bytes:
    """Return at most `limit` bytes from the middle of `text`, from the start of a line and never half a
    character."""
    if len(text) <= limit:
        return text
    start = (len(text) - limit) // 2
    line = text.find(b"\n", start, start + limit // 2)
    cut = text[line + 1 : line + 1 + limit] if line >= 0 else text[start : start + limit]
    return cut.decode("utf-8", "ignore").encode()


def _portable(path: Path) -> str:
    """Return the source path of a document without Python's installation prefix."""
    library = Path(sysconfig.get_path("stdlib"))
    return f"python/{path.relative_to(library)}" if path.is_relative_to(library) else str(path)
