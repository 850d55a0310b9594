"""`/register` of an encrypted stream names the publisher's public key."""

from __future__ import annotations

import zmq
from index_client import Client

from indexer import Indexer

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
