"""Migration service: collects demand and placements, plans migrations and coordinates expert handovers.

It also keeps the record of the placement that each engine serves.
"""
