"""API keys, what they allow, and what keeps tenants apart. Pure."""
