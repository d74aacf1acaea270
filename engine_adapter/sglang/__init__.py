"""Agent of an SGLang server, and the HTTP servers of its ranks. Written from the source of SGLang 0.5.23 and
never run with it."""
