"""API keys, their rights, and the isolation of tenants. Pure."""
