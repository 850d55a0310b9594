"""HTTP/1.1 as bytes: heads, chunks, origins, request ids and deadlines. Knows nothing of routing."""
