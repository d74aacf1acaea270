"""Hears what was activated, says what is popular (and, later, how to predict it)."""
