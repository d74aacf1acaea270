"""The router: hears all, decides which rank serves a request, forwards it, and explains why.

Admission rule: what a request needs between a client's socket and a rank's. Deciding modules (view, roster, candidates,
scoring, decision, reservations, prefixes, course, answers, locality, and what foretells: rows, replica, foresight) are pure: time
and chance come in as arguments. What is awaited happens around them, in `service` (facts from the bus), `plain` (facts from
foreign servers) and `proxy` (the stream).
"""
