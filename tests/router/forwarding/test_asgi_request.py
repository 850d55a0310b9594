"""Requests that the ASGI application answers with one response, whatever it does, and long bodies read in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from http_api.errors import RequestError
from router.apis.requests import ChatPrompt, TextPrompts
from router.auth import AuthGate
from router.forwarding.dispatcher import AsgiRequest
from router.forwarding.exchange import ResponseWriter, RoutingHeaders
from router.forwarding.proxy_services import LongBodies
from router.forwarding.request_context import RequestContexts, RequestHead
from router.http.headers import ResponseHead
from router.settings import Settings
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

App = Callable[[Scope, Receive, Send], Awaitable[None]]
HOST = (b"host", b"r")


class Written(ResponseWriter):
    """A writer that keeps the response to the client."""

    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []
        self.ended = self.broken_off = False

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:  # noqa: ARG002
        assert not self.status
        self.status = head.status
        self.more(data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        assert not self.ended
        self.parts.append(data)
        self.ended = ended

    def break_off(self) -> None:
        self.broken_off = True


def started(app: App, method: str = "POST", body: bytes = b"{}") -> tuple[AsgiRequest, Written]:
    contexts = RequestContexts(AuthGate(Settings()), None, None, log=False)
    context = contexts.begin(RequestHead(method, "/match", b"/match?a=b", [HOST]), ("127.0.0.1", 80))
    written = Written()
    request = AsgiRequest(context, written, app)
    request.start(body)
    return request, written


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def begin(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def test_head_with_a_length_is_written_with_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/match", b"a=b")
        assert scope["server"] == ("127.0.0.1", 80)
        assert await receive() == {"type": "http.request", "body": b"{}", "more_body": False}
        await begin(send, (b"Content-Length", b"2"))
        await send({"type": "http.response.body", "body": b"ok"})
        assert await receive() == {"type": "http.disconnect"}

    _, written = started(app)
    await turns()
    assert (written.status, written.parts, written.ended) == (200, [b"ok"], True)


async def test_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    part = asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await begin(send)
        await part.wait()
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    request, written = started(app, "GET")
    await turns()
    assert written.status == 200
    assert request.answering
    part.set()
    await turns()
    assert b"".join(written.parts) == b"12"
    assert written.ended


async def test_head_request_is_a_get_whose_body_is_not_written() -> None:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        assert scope["method"] == "GET"
        await begin(send)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"x"})

    _, written = started(app, "HEAD", b"")
    await turns()
    assert (written.status, b"".join(written.parts), written.ended) == (200, b"", True)


@pytest.mark.parametrize("returns", [True, False])
async def test_application_that_fails_before_its_response_is_a_500(returns: bool) -> None:
    async def app(*_: object) -> None:
        if not returns:
            raise ValueError("a mistake")

    _, written = started(app)
    await turns()
    assert (written.status, written.ended) == (500, True)
    assert b"This is a bug" in written.parts[0]


async def test_response_of_an_application_that_fails_is_broken_off() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await begin(send)
        raise ValueError("a mistake")

    _, written = started(app)
    await turns()
    assert (written.status, written.ended, written.broken_off) == (200, False, True)


async def test_application_waits_while_the_client_does_not_read() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await begin(send)
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    request, written = started(app)
    request.pause()
    await turns()
    assert not written.status
    request.resume()
    await turns()
    assert written.ended


async def test_disconnect_is_received_and_nothing_more_is_written() -> None:
    received = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        received.extend([await receive(), await receive()])
        await send({"type": "http.response.body", "body": b"1"})

    request, written = started(app)
    await turns()
    request.client_disconnected()
    await turns()
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]
    assert not written.ended
    assert not written.broken_off


async def test_post_body_that_makes_too_much_work_is_refused() -> None:
    async def app(*_: object) -> None:
        raise AssertionError("the application must not be called")

    request, written = started(app, body=b"[" + b"1," * 2_000_000 + b"1]")
    assert request._task is not None
    await request._task
    assert written.status == 413


async def test_long_bodies_leave_the_loop_free_and_are_bounded() -> None:
    bodies, gate = LongBodies(100), threading.Event()
    try:
        first = asyncio.create_task(bodies.read(60, lambda: gate.wait(30)))
        second = asyncio.create_task(bodies.read(40, lambda: "read"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="being received") as refused:
            await bodies.read(60, lambda: "never")
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        second.cancel()  # its client left: there is room again
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(bodies.read(40, lambda: "read"))
        await asyncio.sleep(0)
        gate.set()
        assert (await first, await third) == (True, "read")
    finally:
        await bodies.close()


async def test_a_prompt_that_is_too_long_is_not_tokenized() -> None:
    tokenizers = Tokenizers(most_characters=10)
    try:
        for texts in (["x" * 11], ["x" * 6, "y" * 5]):
            with pytest.raises(RequestError, match=r"11 characters.*limits\.characters"):
                tokenizers.tokenize_now("m", TextPrompts(texts), 100)
    finally:
        await tokenizers.close()


LONG_TEXT = "x" * 400


@pytest.mark.parametrize(
    "chat",
    [
        ChatPrompt([{"role": "assistant", "tool_calls": [{"function": {"arguments": LONG_TEXT}}]}]),
        ChatPrompt([], [{"type": "function", "function": {"name": "f", "description": LONG_TEXT}}]),
        ChatPrompt([{"role": "user", "content": [{"type": "image_url", "image_url": "i", "text": LONG_TEXT}]}]),
    ],
    ids=["arguments", "tools", "beside media"],
)
async def test_all_text_of_a_prompt_counts_except_for_media(chat: ChatPrompt) -> None:
    chat.messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 1000}}]})
    tokenizers = Tokenizers(most_characters=300)
    try:
        with pytest.raises(RequestError, match="characters"):
            tokenizers.tokenize_now("m", chat, 1500)
        with pytest.raises(TokenizerUnavailableError, match="no tokenizer"):
            tokenizers.tokenize_now("m", ChatPrompt(chat.messages[-1:]), 1100)
    finally:
        await tokenizers.close()
