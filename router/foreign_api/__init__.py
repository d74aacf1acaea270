"""APIs of servers that Roost does not run: routes, fields, headers, streams, as far as routing reads them. Pure.

Admission rule: values and rules. What talks to such servers is in `passthrough` and `upstream`.
"""
