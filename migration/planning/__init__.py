"""Choose a placement, the handovers that lead to it, and the reasons: strategies compared by gain against
cost. Pure.

Admission rule: code that chooses between solvers or prices their results. Array algorithms are in `solvers`.
"""
