"""Large bodies: decoded, rendered and tokenised in other processes, in fair turns of their clients.

Admission rule: what is done with a body between its last byte and the token ids of its prompts, where that takes longer than the event loop may
be kept. `tasks` is what is done; it is pure, and runs in the loop's thread, in a thread beside it, or in a worker process.
"""
