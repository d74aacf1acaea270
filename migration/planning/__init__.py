"""Which placement, in which steps, and why: strategies compared by gain against cost. Pure.

Admission rule: what chooses between solvers or prices their results. Array algorithms are in `solvers`.
"""
