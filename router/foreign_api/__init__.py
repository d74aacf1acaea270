"""APIs of servers that Roost does not run: routes, fields, headers and streams, as far as routing reads them.
Pure.

Admission rule: values and rules. The code that talks to such servers is in `passthrough` and `upstream`.
"""
