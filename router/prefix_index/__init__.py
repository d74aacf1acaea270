"""Index of the prompt prefixes cached by each rank: exact from KV events, approximate without them. Pure."""
