"""Output of commands: fleet state as text, tables, JSON or a live screen.

Admission rule: formats an answer for people or programs. Queries over the bus are in `client`.
"""
