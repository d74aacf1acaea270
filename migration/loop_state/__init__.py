"""State and decisions of the control loop for one engine. Pure; time comes in as an argument.

Admission rule: values and rules of the loop itself: its plans and their verdicts, its budgets, its windows, what it persists.
"""
