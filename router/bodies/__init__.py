"""Large bodies: decode, render and tokenise them in worker processes, with fair queueing between clients.

Admission rule: work on a body between its last byte and the token ids of its prompts that would block the
event loop for too long. `tasks` is the work itself; it is pure, and runs on the event loop, in a thread, or
in a worker process.
"""
