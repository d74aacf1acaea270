"""Zip archive in which an engine announces its tokenizer to routers. Pure."""

import io
import zipfile
from collections.abc import Mapping

_TIME = (1980, 1, 1, 0, 0, 0)
"""Fixed, so that equal tokenizers produce equal archives."""


def archived(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of these files, by name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED)
    return content.getvalue()
