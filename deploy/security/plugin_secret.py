"""Secret that the agent of a vLLM deployment shares with the plugin in vLLM's worker processes."""

import secrets
from pathlib import Path

from deploy.run_directory import private_text

MIN_BYTES = 16
_SECRET_BYTES = 32


class NoPluginSecret(ValueError):
    """The secret file cannot be used; the text names it and the reason."""


def plugin_secret(file: Path) -> bytes:
    """Return the secret in a file, without surrounding white space. A file that is missing is created,
    readable by its owner alone. Raises NoPluginSecret."""
    try:
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            private_text(file, secrets.token_urlsafe(_SECRET_BYTES) + "\n")
        if file.stat().st_mode & 0o077:
            raise NoPluginSecret(f"{file} can be read by other users: chmod 600 {file}")
        secret = file.read_bytes().strip()
    except OSError as error:
        raise NoPluginSecret(f"secret_file {file}: {error.strerror}") from error
    if len(secret) < MIN_BYTES:
        raise NoPluginSecret(f"{file} must hold at least {MIN_BYTES} characters, not {len(secret)}")
    return secret
