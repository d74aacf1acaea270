"""State and decisions of the control loop for one engine. Pure; time is an argument.

Admission rule: values and rules of the loop: its plans and their verdicts, budgets, windows and persistent
state.
"""
