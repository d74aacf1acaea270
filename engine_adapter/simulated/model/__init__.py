"""What the simulated engine computes instead of a model: routing, step times, dispatch, memory. Pure.

Admission rule: a formula or a value. What waits, and what serves, is in `simulated` itself.
"""
