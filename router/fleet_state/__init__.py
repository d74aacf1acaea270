"""The fleet as seen by routing: engines, targets, load, homes, dispatch costs. Pure; the time comes in as an
argument.
"""
