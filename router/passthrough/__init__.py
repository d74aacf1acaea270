"""The door to servers that Roost does not run: any OpenAI-compatible server, spoken to with the client's
own bytes."""
