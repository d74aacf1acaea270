"""TLS, credentials of the bus, and the conditions for listening on addresses that other machines reach."""
