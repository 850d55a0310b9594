"""Reading what a worker answers to a question of ours, and no more of it than is worth reading."""

from __future__ import annotations

import aiohttp

_AT_A_TIME = 64 * 1024


async def read_answer(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body of an answer. Raises ValueError when it is longer than `most_bytes`; the connection is then closed."""
    body = bytearray()
    async for part in response.content.iter_chunked(_AT_A_TIME):
        body += part
        if len(body) > most_bytes:
            response.close()
            raise ValueError(f"{response.url.path} answers with more than {most_bytes} bytes (fleet.max_answer_bytes)")
    return bytes(body)
