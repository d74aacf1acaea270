"""The OpenAI API: requests checked field by field, answers in its formats. Pure."""
