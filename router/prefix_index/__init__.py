"""Which rank holds which prefix of a prompt: exact from KV events, approximate where there are none. Pure."""
