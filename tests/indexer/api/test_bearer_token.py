"""Routes that need the token, and registrations of encrypted streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import uvicorn
import zmq
from index_client import Client, admit
from waiting import eventually

from indexer import Indexer, MatchQuery
from indexer.api.questions import Questions
from indexer.api.routes import indexer_app

REGISTRATION = {"endpoint": "tcp://127.0.0.1:5999", "modelname": "m", "instance_id": "w", "block_size": 2}


async def read_nothing(body: bytes) -> MatchQuery:
    raise NotImplementedError


@pytest.fixture
def guarded(indexer: Indexer) -> Iterator[Client]:
    """Client of an indexer whose token is `s3cret`."""
    indexer.start()
    app = indexer_app(indexer, Questions(indexer, read_nothing), admit, token="s3cret")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started)
    client = Client(server.servers[0].sockets[0].getsockname()[1])
    yield client
    client.close()
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer other", "Basic s3cret", "s3cret", "Bearer s3cret2"])
@pytest.mark.parametrize("path", ["/register", "/unregister"])
def test_routes_that_change_state_require_the_token(guarded: Client, given: str, path: str) -> None:
    status, answer = guarded.post(path, REGISTRATION, authorization=given)
    assert status == 401
    assert answer["error"]["param"] == "authorization"
    assert guarded.get("/workers")[1] == {"workers": [], "publishers": []}


def test_routes_accept_the_token(guarded: Client) -> None:
    assert guarded.post("/register", REGISTRATION, authorization="Bearer s3cret")[0] == 201
    assert guarded.post("/unregister", {"instance_id": "w"}, authorization="bearer s3cret")[0] == 200


def test_queries_need_no_token(guarded: Client) -> None:
    assert guarded.get("/health")[0] == 200
    assert guarded.request("GET", "/dump")[0] == 200
    assert guarded.post("/query", {"model": "m", "token_ids": [1]})[0] == 404


STREAM = {"endpoint": "tcp://127.0.0.1:1", "modelname": "m", "instance_id": "w"}


def test_register_accepts_a_curve_key(client: Client, indexer: Indexer) -> None:
    public, _ = zmq.curve_keypair()
    assert client.post("/register", STREAM | {"curve_server_key": public.decode()})[0] == 201
    (registration,) = indexer.registered()
    assert registration.source is not None
    assert registration.source.curve_server_key == public.decode()


def test_invalid_curve_key_is_rejected(client: Client, indexer: Indexer) -> None:
    status, answer = client.post("/register", STREAM | {"curve_server_key": "worker-1.key"})
    assert (status, answer["error"]["param"]) == (400, "curve_server_key")
    assert "40 characters" in answer["error"]["message"]
    assert indexer.registered() == []
