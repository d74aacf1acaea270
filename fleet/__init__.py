"""The common tongue: frozen values and pure functions that two or more parts share.

Admission rule: a module lives here only while at least two parts import it (a test checks), and it imports nothing but
numpy, msgspec, xxhash and its own siblings: no clock, no I/O, no logging, no randomness.
"""
