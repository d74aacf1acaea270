"""Static files of the dashboard, read once."""

import hashlib
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
INDEX = "index.html"


class StaticFile(NamedTuple):
    """One file, with its entity tag."""

    content: bytes
    media_type: str
    etag: str


def read_bundle() -> dict[str, StaticFile]:
    """Return the files of the bundle by name, with slashes. OSError if it cannot be read."""
    return {
        path.relative_to(_FOLDER).as_posix(): _read(path)
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
