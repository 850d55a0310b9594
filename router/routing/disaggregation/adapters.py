"""The two requests of a disaggregated request, as each engine requires them.

- SGLang: both are sent at once, with a room in which the two workers meet.
- vLLM with NIXL: the prefill is sent first, for one token. Its answer names the blocks that the decode worker pulls.
- vLLM with Mooncake: both are sent at once, with a transfer id that both know.
- TensorRT-LLM: the context phase is sent first. Its answer becomes a part of the generation request.
- Sidecar (llm-d): a header names the prefill worker, and the decode worker's sidecar sends it the prefill.

`docs/disaggregated-routing.md` lists which releases of each engine take these fields on which path.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from indexer.hashing import PackedPrompt
from kvevents.decoding import read_json
from router.apis.endpoints import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES
from router.apis.json_edit import with_field
from router.apis.prompt_ids import with_prompt_ids
from router.fleet.worker import Worker
from router.http.headers import Headers
from router.routing.disaggregation.bodies import (
    answered_field,
    answers_in,
    encoded,
    fields_of,
    prompts_in,
    value_of,
    with_fields,
)
from router.routing.pulls import PullEndpoint
from router.settings import Backend, PullProtocol

_IDS = "prompt_token_ids"
_MAX_ROOM = 2**63
# The fields that limit an answer to one token, by path, and those that keep the prefill worker from storing the answer.
_ONE_TOKEN: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False, "background": False},
}
_AGENTS = frozenset({ANTHROPIC, RESPONSES})
_OVERRIDE = b"x-override-"


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """The address of one worker of a pair, its chosen rank, and the port of its engine's bootstrap service."""

    host: str
    port: int
    dp_rank: int = 0
    dp_size: int = 1
    bootstrap_port: int = 8998

    @classmethod
    def of(cls, worker: Worker, dp_rank: int) -> WorkerEndpoint:
        """Return the endpoint of a worker's rank."""
        url = urlsplit(worker.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        rank = worker.rank_in_requests(dp_rank)
        return cls(url.hostname or "", port, rank, len(worker.ranks()), worker.bootstrap_port)

    @property
    def address(self) -> str:
        """The host in the form that URLs need: IPv6 addresses in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The request to one of the two workers: a body, and headers beside those of the client."""

    body: bytes
    headers: Headers = field(default_factory=list)


class AnsweredError(Exception):
    """The answer of the prefill worker is complete. `body` is sent to the client."""

    def __init__(self, body: bytes, content_type: bytes) -> None:
        super().__init__("answered by the prefill")
        self.body = body
        self.content_type = content_type


class Adapter:
    """The two requests for one client's request. Methods raise RequestError for a body that cannot be changed.

    - `concurrent`: whether both are sent at once. If not, the decode request follows the prefill's answer.
    - `decodes_alone`: whether a decode worker can compute a prompt itself.
    - `prefills`: whether the router sends a request to the prefill worker.
    - `one_answer`: whether the KV cache of only one prompt, for one answer, can be handed over.
    - `paths`: the paths of requests that can be disaggregated, in the engine's newest release.
    - `refusal`: why a worker may refuse to hand over a prompt of these paths, and what to do, in words.
    - `sends_ids`: whether both requests can carry the prompt's token ids.
    - `pulls`: the forms in which its requests can name the peer that the prefill pulls from.
    - `pull`: the peer that the prefill pulls from; None without a pull.
    - `prompt_body`: the body for the worker that computes the prompt, with what encode workers answered.
    """

    concurrent: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True
    prefills: ClassVar[bool] = True
    one_answer: ClassVar[bool] = True
    paths: ClassVar[frozenset[str]] = frozenset({CHAT, COMPLETIONS})
    refusal: ClassVar[str] = "its engine refuses to hand over prompts of this path"
    sends_ids: ClassVar[bool] = False
    pulls: ClassVar[frozenset[PullProtocol]] = frozenset()

    @classmethod
    def of(
        cls, path: str, body: bytes, prefill: WorkerEndpoint, decode: WorkerEndpoint, ids: PackedPrompt | None = None
    ) -> Adapter:
        """Return the adapter of one request. Raises RequestError for a body that cannot be changed.

        `ids`: the prompt's token ids, for an adapter that `sends_ids`; None without them.
        """
        alone = cls.one_answer and answers_in(fields_of(body)) != 1
        adapter = (DecodeAlone if alone else cls)(path, body, prefill, decode)
        adapter.ids = ids
        return adapter

    def __init__(self, path: str, body: bytes, prefill: WorkerEndpoint, decode: WorkerEndpoint) -> None:
        self.path = path
        self.body = body
        self.prompt_body = body
        self.ids: PackedPrompt | None = None
        self.prefill_worker = prefill
        self.decode_worker = decode
        self.pull: PullEndpoint | None = None

    @property
    def query_url(self) -> str | None:
        """The URL that is requested first, for `read_query`; None if no query is needed."""
        return None

    def read_query(self, answer: bytes) -> None:
        """Apply the answer of `query_url`. Raises ValueError if it is invalid."""

    def prefill(self) -> PreparedRequest:
        """Return the request to the prefill worker."""
        raise NotImplementedError

    def decode(self, prefilled: bytes) -> PreparedRequest:
        """Return the request to the decode worker, after the prefill's answer if that was sent first.

        Raises AnsweredError if the answer is complete, and ValueError if it is invalid.
        """
        raise NotImplementedError

    @property
    def abort(self) -> PreparedRequest | None:
        """The request to a worker's `/abort_request`; None if closing the connection is enough to abort."""
        return None


class Sglang(Adapter):
    """SGLang: the two meet in a room of the prefill's bootstrap service.

    Messages name it in headers, which SGLang reads only if it is started with `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`.
    """

    concurrent = True
    decodes_alone = False
    one_answer = False
    paths = Adapter.paths | _AGENTS | {"/generate"}
    refusal = (
        "its SGLang hands over no prompts of this path: /v1/messages needs SGLang 0.5.18 and the variable "
        "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1 of its workers, /v1/responses needs SGLang 0.5.20"
    )
    sends_ids = True

    def __init__(self, path: str, body: bytes, prefill: WorkerEndpoint, decode: WorkerEndpoint) -> None:
        super().__init__(path, body, prefill, decode)
        fields = fields_of(body)
        prompts = prompts_in(fields) if path not in _AGENTS else None
        self._room = self._new_room() if prompts is None else [self._new_room() for _ in range(prompts)]
        # A response's id is the id of its request.
        self._rid_field, prefix = ("request_id", "resp_") if path == RESPONSES else ("rid", "")
        rid = value_of(fields, self._rid_field) if path != ANTHROPIC else None
        self._rid = rid if rid is not None else f"{prefix}{uuid4().hex}"

    def prefill(self) -> PreparedRequest:
        fields = self._bootstrap_fields()
        if self.prefill_worker.dp_size > 1:
            fields["routed_dp_rank"] = self.prefill_worker.dp_rank
        if self.path == RESPONSES:
            fields |= {"store": False, "background": False}
        return self._prepared(fields)

    def decode(self, prefilled: bytes) -> PreparedRequest:  # noqa: ARG002
        fields = self._bootstrap_fields()
        if self.prefill_worker.dp_size > 1:
            fields["disagg_prefill_dp_rank"] = self.prefill_worker.dp_rank
        if self.decode_worker.dp_size > 1:
            fields["routed_dp_rank"] = self.decode_worker.dp_rank
        return self._prepared(fields)

    def _prepared(self, fields: dict[str, Any]) -> PreparedRequest:
        """Return a request with these fields: in headers for messages, whose body has none of them."""
        if self.path != ANTHROPIC:
            return PreparedRequest(with_fields(self.body, **fields))
        headers = [(_OVERRIDE + name.replace("_", "-").encode(), str(value).encode()) for name, value in fields.items()]
        return PreparedRequest(self.body, headers)

    @property
    def abort(self) -> PreparedRequest | None:
        return PreparedRequest(msgspec.json.encode({"rid": self._rid}), [(b"content-type", b"application/json")])

    def _bootstrap_fields(self) -> dict[str, Any]:
        worker = self.prefill_worker
        bootstrap = {"bootstrap_host": worker.host, "bootstrap_port": worker.bootstrap_port}
        ids = {} if self.ids is None else {"input_ids": msgspec.Raw(self.ids.json())}
        return bootstrap | {"bootstrap_room": self._room, self._rid_field: self._rid} | ids

    def _new_room(self) -> int:
        """Return a random room that the prefill worker's chosen rank serves."""
        size = self.prefill_worker.dp_size
        room = random.randrange(_MAX_ROOM - size)
        return room - room % size + self.prefill_worker.dp_rank


class Nixl(Adapter):
    """vLLM with NIXL: the decode worker pulls the blocks that the prefill's answer names."""

    paths = Adapter.paths | _AGENTS
    sends_ids = True
    pulls = frozenset({PullProtocol.P2P})

    def prefill(self) -> PreparedRequest:
        remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **remote, **_ids_field(self.ids)}
        body = _one_token(self.path, self.prompt_body, kv_transfer_params=wanted)
        return PreparedRequest(body if self.pull is None else self.pull.body(body))

    def decode(self, prefilled: bytes) -> PreparedRequest:
        transfer_params = answered_field(prefilled, "kv_transfer_params")
        if transfer_params is None:  # no blocks to pull: the decode worker computes the prompt
            return _computing(self.prompt_body, self.ids)
        if self.ids is not None:
            transfer_params = msgspec.Raw(with_field(bytes(transfer_params), _IDS, self.ids.json()))
        return PreparedRequest(with_fields(self.body, kv_transfer_params=transfer_params))


class Mooncake(Adapter):
    """vLLM with Mooncake: both know the transfer id, and the decode worker the address of the bootstrap service."""

    concurrent = True
    paths = Adapter.paths | _AGENTS
    sends_ids = True

    def __init__(self, path: str, body: bytes, prefill: WorkerEndpoint, decode: WorkerEndpoint) -> None:
        super().__init__(path, body, prefill, decode)
        self._transfer = f"kvrouter-{uuid4().hex}"
        self._engine_id = ""

    @property
    def query_url(self) -> str | None:
        return f"http://{self.prefill_worker.address}:{self.prefill_worker.bootstrap_port}/query"

    def read_query(self, answer: bytes) -> None:
        ranks = read_json(answer, dict[str, dict[str, Any]])
        engine_id = ranks.get(str(self.prefill_worker.dp_rank), {}).get("engine_id")
        if not isinstance(engine_id, str):
            raise ValueError(f"no engine_id for rank {self.prefill_worker.dp_rank}")
        self._engine_id = engine_id

    def prefill(self) -> PreparedRequest:
        wanted = {"do_remote_decode": True, "transfer_id": self._transfer, **_ids_field(self.ids)}
        body = _one_token(self.path, self.prompt_body, kv_transfer_params=wanted)
        return PreparedRequest(body, [(b"x-data-parallel-rank", b"%d" % self.prefill_worker.dp_rank)])

    def decode(self, prefilled: bytes) -> PreparedRequest:  # noqa: ARG002
        address = f"http://{self.prefill_worker.address}:{self.prefill_worker.bootstrap_port}"
        source = {"remote_bootstrap_addr": address, "remote_engine_id": self._engine_id}
        wanted = {"do_remote_prefill": True, "transfer_id": self._transfer, **source, **_ids_field(self.ids)}
        return PreparedRequest(with_fields(self.body, kv_transfer_params=wanted))


class TensorRtLlm(Adapter):
    """TensorRT-LLM, context first: the answer's parameters become those of the generation request."""

    def __init__(self, path: str, body: bytes, prefill: WorkerEndpoint, decode: WorkerEndpoint) -> None:
        super().__init__(path, body, prefill, decode)
        self._request_id = random.randrange(_MAX_ROOM)

    def prefill(self) -> PreparedRequest:
        wanted = {"request_type": "context_only", "disagg_request_id": self._request_id}
        fields = fields_of(self.prompt_body)
        fields.pop("stream_options", None)
        return PreparedRequest(encoded(fields, stream=False, disaggregated_params=wanted))

    def decode(self, prefilled: bytes) -> PreparedRequest:
        answer = read_json(prefilled, dict[str, Any])
        choice = answer["choices"][0] if answer.get("choices") else None
        if not isinstance(choice, dict):
            raise ValueError("it has no choices")
        if choice.get("finish_reason") not in ("length", "not_finished"):
            raise _complete_answer(answer, choice, self.body)
        params = choice.get("disaggregated_params")
        if not isinstance(params, dict):
            raise ValueError("choices[0] has no disaggregated_params")
        fields: dict[str, Any] = {"disaggregated_params": params | {"request_type": "generation_only"}}
        if (token_ids := answer.get("prompt_token_ids")) is not None:
            fields["prompt_token_ids" if self.path == CHAT else "prompt"] = token_ids
        return PreparedRequest(with_fields(self.body, **fields))


class DecodeAlone(Adapter):
    """Several prompts, or several answers to one prompt: the decode worker computes all of them.

    Only the KV cache of one prompt can be handed over, and all answers would be computed from it.
    """

    concurrent = True
    prefills = False

    def decode(self, prefilled: bytes) -> PreparedRequest:  # noqa: ARG002
        return _computing(self.prompt_body, self.ids)


class Sidecar(Adapter):
    """llm-d: the decode worker's sidecar sends the request to the prefill worker."""

    concurrent = True
    prefills = False
    paths = Adapter.paths | _AGENTS
    pulls = frozenset({PullProtocol.SIDECAR})

    def decode(self, prefilled: bytes) -> PreparedRequest:  # noqa: ARG002
        to = f"{self.prefill_worker.address}:{self.prefill_worker.port}"
        named = [] if self.pull is None else self.pull.headers
        return PreparedRequest(self.body, [(b"x-prefiller-host-port", to.encode()), *named])


ADAPTERS: dict[Backend, type[Adapter]] = {
    Backend.SGLANG: Sglang,
    Backend.NIXL: Nixl,
    Backend.MOONCAKE: Mooncake,
    Backend.TRTLLM: TensorRtLlm,
    Backend.SIDECAR: Sidecar,
}


def _one_token(path: str, body: bytes, **values: Any) -> bytes:
    """Return a body that only computes the prompt: one token, not streamed."""
    fields = fields_of(body)
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    return encoded(fields, stream=False, **_ONE_TOKEN.get(path, {"max_tokens": 1}), **values)


def _computing(body: bytes, ids: PackedPrompt | None) -> PreparedRequest:
    """Return the request to a worker that computes the whole prompt."""
    return PreparedRequest(body if ids is None else with_prompt_ids(body, ids))


def _ids_field(ids: PackedPrompt | None) -> dict[str, msgspec.Raw]:
    """Return the field of `kv_transfer_params` with the prompt's token ids; empty without them."""
    return {} if ids is None else {_IDS: msgspec.Raw(ids.json())}


def _complete_answer(answer: dict[str, Any], choice: dict[str, Any], body: bytes) -> AnsweredError:
    """Return the prefill's complete answer, as a stream if the client requested one."""
    answer.pop("prompt_token_ids", None)
    choice.pop("disaggregated_params", None)
    stream = fields_of(body).get("stream")
    if stream is None or bytes(stream) != b"true":
        return AnsweredError(msgspec.json.encode(answer), b"application/json")
    if "message" in choice:
        choice["delta"] = choice.pop("message")
        answer["object"] = "chat.completion.chunk"
    events = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer)
    return AnsweredError(events, b"text/event-stream")
