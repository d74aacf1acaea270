"""Which requests may wait or be tried again, and in which order. Pure; time comes in as an argument."""
