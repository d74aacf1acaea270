"""Expert activity as reported by engines: decay windows, gaps in reports, validation of messages. Pure."""
