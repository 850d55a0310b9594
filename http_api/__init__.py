"""The HTTP API's ground: errors with OpenAI's error body, JSON responses, and the OpenAPI document's helpers."""
