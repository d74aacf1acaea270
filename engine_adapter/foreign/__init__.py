"""Agents beside servers that Roost does not run, as far as they are alike: HTTP client, KV events over ZMQ,
and the reports of one target.

Admission rule: code that agents of two kinds of servers need. What one kind alone has belongs to its own
room.
"""
