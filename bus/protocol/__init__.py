"""Subjects, names, roles, permissions, sequence numbers and message encoding. Pure; shared by both
implementations of the bus.
"""
