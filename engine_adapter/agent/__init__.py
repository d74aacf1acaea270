"""Agent beside each rank: announces the engine, publishes its events, and takes part in handovers.

Admission rule: code that uses the bus on behalf of an engine, whatever the engine.
"""
