"""File descriptors: raise the limit to the maximum, and cap connections so that some descriptors stay
free."""

import errno
import logging
import os
import resource

MAX_SOFT_LIMIT = 1 << 20
"""Upper bound of the soft limit: some programs iterate over all allowed descriptors."""
RESERVED = 32
"""Descriptors kept for files, pipes, listening sockets, NATS and libraries."""
log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raise the soft limit of this process and its children to the hard limit. Returns the limit; logs a
    change."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = MAX_SOFT_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_SOFT_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        log.info("the limit of open file descriptors was raised from %d to %d", soft, new_limit)
        return new_limit
    return MAX_SOFT_LIMIT if soft == resource.RLIM_INFINITY else soft


def max_connections() -> int:
    """Return the limit of client connections: half of the remaining descriptors, as each may need a second
    one to a rank."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = MAX_SOFT_LIMIT if soft == resource.RLIM_INFINITY else soft
    return max(8, (limit - RESERVED) // 2)


def are_exhausted() -> bool:
    """Return whether no descriptor is left. uvloop closes the connections that it cannot accept without any
    error."""
    try:
        os.close(os.dup(0))
    except OSError as error:
        return is_exhaustion(error)
    return False


def is_exhaustion(error: OSError) -> bool:
    """Return whether an error means that the process or the system has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
