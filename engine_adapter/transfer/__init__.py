"""Brings experts from the memory of another rank into ours: one port, and one implementation for each way (shared memory, NIXL)."""
