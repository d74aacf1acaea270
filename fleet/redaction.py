"""Removal of credentials from text: the user part of URLs, which may hold a password, before logging,
printing, storing or tracing.
"""

import re

_USERINFO = re.compile(r"://(?:(?!://)\S)*@")
"""From the scheme's slashes to the last @ before white space or the next URL. A password may hold any other
character, including @ and /.
"""
HIDDEN = "://***@"


def without_secrets(text: str) -> str:
    """Return the text with `***` for the user and password of every URL: `nats://me:secret@host` becomes
    `nats://***@host`.

    A URL without a user keeps its form. An @ in a path hides the text before it: hiding too much is the safe
    error.
    """
    return _USERINFO.sub(HIDDEN, text) if "://" in text and "@" in text else text
