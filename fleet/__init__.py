"""Shared types: frozen values and pure functions that two or more parts use.

Admission rule: a module belongs in this package only while at least two parts import it (a test checks this).
It imports nothing but numpy, msgspec, xxhash and its own siblings: no clock, no I/O, no logging, no
randomness.
"""
