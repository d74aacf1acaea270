"""Closed control loop of the migration service: plan for each engine, evaluate the results, roll back harmful
plans.

Admission rule: code that awaits while the loop runs. State and decisions for one engine are pure and are in
`loop_state`.
"""
