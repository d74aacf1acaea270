"""Reports of what ranks did: dispatch, and the experts that requests activated."""
