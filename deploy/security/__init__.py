"""TLS, bus credentials, and the conditions for listening on addresses that other machines reach."""
