"""The router: decides which rank serves a request, forwards it, and explains why.

Admission rule: what a request needs between a client's socket and a rank's. Rooms that decide are pure: time and chance come in as
arguments, and a contract checks it. What is awaited happens around them: in `sync` (facts from the bus), `upstream` (ranks and servers that
Roost does not run) and `service`.
"""
