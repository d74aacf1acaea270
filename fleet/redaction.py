"""Secrets out of text: the user part of URLs, which may hold a password, before anything is logged, printed, stored or traced."""

import re

_USERINFO = re.compile(r"://(?:(?!://)\S)*@")
"""From the scheme's slashes to the last @ before white space or the next URL: a password may hold any other character, @ and / included."""
HIDDEN = "://***@"


def without_secrets(text: str) -> str:
    """The text with `***` in place of the user and the password of every URL in it: `nats://me:secret@host` becomes `nats://***@host`.

    A URL without user keeps its form; an @ in the path of one hides what stands before it (rather too much than too little).
    """
    return _USERINFO.sub(HIDDEN, text) if "://" in text and "@" in text else text
