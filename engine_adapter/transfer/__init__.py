"""Transfers of expert memory between ranks: one port with one implementation per transfer backend (shared
memory, NIXL)."""
