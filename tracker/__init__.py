"""Tracker: learns expert popularity, demand and prediction tables from reports on the bus, and publishes
them.
"""
