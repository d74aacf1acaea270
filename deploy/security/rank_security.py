"""Security of an engine's ranks: the fleet secret and the certificate, both read again at SIGHUP."""

import logging

from deploy.sections import WorkerConfig
from deploy.security.exposure import missing_at_ranks
from deploy.security.tls import CertificateError, ServerTls
from engine_adapter.serving.authentication import RouterAuthentication

log = logging.getLogger(__name__)


class RankSecurity:
    """Secret and certificate of one process with ranks. Raises NoSecret or CertificateError if a file cannot
    be used at the start."""

    def __init__(self, worker: WorkerConfig) -> None:
        self.admission = RouterAuthentication(worker.fleet_secret_file)
        self.tls = ServerTls.of(worker.tls_cert, worker.tls_key)
        # only with `insecure`: otherwise the command refuses to start
        if (lacks := missing_at_ranks(worker)) is not None:
            log.warning("insecure: %s", lacks)

    def reload(self) -> None:
        """Read the files again. An unusable file is logged, and the previous content stays in force."""
        self.admission.reload()
        if self.tls is None:
            return
        try:
            self.tls.check()
        except CertificateError as error:
            log.error("the certificate stays as it was: %s", error)  # noqa: TRY400 an operator's mistake, not a fault
        else:
            self.tls.load()
            log.info("the certificate was read again")
