"""The closed loop of the migration service: it plans for each engine, evaluates what its plans achieved, and rolls back what did harm.

Admission rule: what awaits while the loop runs. What the loop remembers and decides about one engine is pure and lives in `loop_state`.
"""
