"""Dashboard for operators: a page in the browser, fed by server-sent events of the router."""
