"""Views of the dashboard: what the router knows, as values for the page. Pure."""
