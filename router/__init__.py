"""The router: it chooses a worker for each request, and proxies the request to it. CONTRIBUTING.md has its rooms."""
