"""Events from the bus on their way into the router, and the router's own events on their way out.

Admission rule: subscribers and publishers that keep `fleet_state`, `prefix_index` and `prediction` up to
date.
"""
