"""HTTP/1.1 as bytes: heads, chunks, origins, request ids and deadlines. It does not depend on routing."""
