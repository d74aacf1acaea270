"""The router: choose the rank that serves each request, forward the request, and explain the choice.

Admission rule: code that a request needs between a client's socket and a rank's socket. The rooms that decide
are pure: time and randomness are arguments, and an import contract checks this. The asynchronous code is
around them: in `sync` (events from the bus), `upstream` (ranks and static backends) and `service`.
"""
