"""File descriptors: as many as the system allows, and connections no more than leave some for everything else."""

import errno
import logging
import os
import resource

MOST_SOFT = 1 << 20
"""Where the hard limit is larger still, this is enough: some programs walk through all that are allowed."""
RESERVED = 32
"""For files, pipes, listening sockets, NATS and libraries."""
log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raise this process's soft limit to the hard one, for its children too; the limit now. Says so where it changes anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_SOFT if hard == resource.RLIM_INFINITY else min(hard, MOST_SOFT)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        log.info("the limit of open file descriptors was raised from %d to %d", soft, most)
        return most
    return MOST_SOFT if soft == resource.RLIM_INFINITY else soft


def most_connections() -> int:
    """Connections that clients may have: half of what the limit leaves, as each may need another one to a rank."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = MOST_SOFT if soft == resource.RLIM_INFINITY else soft
    return max(8, (limit - RESERVED) // 2)


def are_exhausted() -> bool:
    """Whether not one is left. Nothing else would say so: uvloop closes the connections that it cannot take, without a word."""
    try:
        os.close(os.dup(0))
    except OSError as error:
        return is_exhaustion(error)
    return False


def is_exhaustion(error: OSError) -> bool:
    """Whether an error says that the process, or the system, has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
