"""Values that planning, execution and the loop share: an engine, a plan, its cost, its history. Pure."""
