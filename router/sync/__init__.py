"""Facts from the bus on their way into the router, and its own facts on their way out.

Admission rule: subscribers and publishers that keep `fleet_state`, `prefix_index` and `prediction` true.
"""
