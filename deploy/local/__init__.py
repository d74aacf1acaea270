"""A whole fleet on this machine: child processes, a private NATS server, shared sockets."""
