"""No request of ours follows a redirect: it would lead, with a prompt or a token, to where nobody allowed it."""

from __future__ import annotations

import aiohttp

_REDIRECTS = range(300, 400)


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request as aiohttp's middlewares do. Raises ClientResponseError for an answer that leads elsewhere."""
    response = await handler(request)
    if response.status in _REDIRECTS:
        response.close()
        raise aiohttp.ClientResponseError(
            response.request_info,
            (),
            status=response.status,
            message="it leads elsewhere, and redirects are not followed",
            headers=response.headers,
        )
    return response
