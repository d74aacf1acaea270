"""Models behind the simulated engine: routing, step times, dispatch, memory. Pure.

Admission rule: a formula or a value. Code that waits or serves is in `simulated` itself.
"""
