"""Certificates of an authority made for a test."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificate:
    """The files that a door reads, and what vouches for them."""

    cert: Path
    key: Path
    ca: Path

    def renew(self, *names: str) -> "Certificate":
        """Put another certificate into the same files, of an authority that nothing trusts yet."""
        return certificate(self.cert.parent, *names)


def certificate(folder: Path, *names: str) -> Certificate:
    """A certificate for these names and addresses, written to cert.pem, key.pem and ca.pem."""
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    made = Certificate(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    issued.private_key_pem.write_to_path(str(made.key))
    made.cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(made.ca))
    return made
