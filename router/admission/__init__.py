"""Who waits in the router, and who goes on first."""
