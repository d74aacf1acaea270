"""Reports of ranks: KV changes, load, activated experts, dispatch statistics, and profiles of finished
requests."""
