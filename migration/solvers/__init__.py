"""Placement algorithms: arrays in, arrays out. Pure numpy; no engine, no message, no clock.

Admission rule: an algorithm that could be published with its complexity. What calls it, and when, is decided in `planning`.
"""
