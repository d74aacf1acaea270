"""Output of commands: state of a fleet as text, tables, JSON or a live screen.

Admission rule: what formats an answer for people or programs. What asks for it over the bus is in `client`.
"""
