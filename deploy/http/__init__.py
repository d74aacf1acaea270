"""HTTP servers with limits, for routers, ranks and metrics: sockets, deadlines, draining."""
