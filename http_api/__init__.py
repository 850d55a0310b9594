"""Ground of the HTTP APIs: request errors, reading of requests, JSON responses, and OpenAPI descriptions."""
