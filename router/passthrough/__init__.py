"""Passthrough to servers that Roost does not run: any OpenAI-compatible server, with the client's own
bytes."""
