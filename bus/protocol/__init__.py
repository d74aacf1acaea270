"""Subjects, names, roles, permissions, sequence numbers and the encoding of messages. Pure: both implementations of the bus share it."""
