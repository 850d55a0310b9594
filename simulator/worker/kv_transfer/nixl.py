"""Disaggregation as in vLLM with NIXL: a prefill worker leases its blocks, and a decode worker pulls them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from kvevents.endpoints import join_host_port
from simulator.worker.cache import CachedSequence
from simulator.worker.engine import Answer, Generation, Output
from simulator.worker.kv_transfer.part import Job, Part, Running
from simulator.worker.kv_transfer.rank import TransferRank, until
from simulator.worker.kv_transfer.transfers import Arrival, ArrivalError, Sending
from simulator.worker.protocol import ApiError, GenerationRequest
from worker.kv_transfer import KVReceiver
from worker.kv_transfer.rooms import MAX_ROOM

LEASE_S = 30.0
PULL_TIMEOUT_S = 5.0
PULL_PATH = "/kv_pull"


class RemotePrefill(BaseModel):
    """The address of a prompt's blocks, in a prefill's answer and in a decode worker's request."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[int]
    remote_host: str
    remote_port: int
    tp_size: int = 1


class PullRequest(BaseModel):
    """The body of a pull: the blocks to write, and the room."""

    engine_id: str
    request_id: str
    block_ids: list[int]
    room: int = Field(ge=0, le=MAX_ROOM)


class PullAnswer(BaseModel):
    """The address of the room."""

    bootstrap_addr: str
    dp_rank: int


@dataclass(slots=True, eq=False)
class _Lease:
    request_id: str
    rank: TransferRank
    sequence: CachedSequence
    block_ids: list[int]
    prompt_tokens: int
    token: int
    cached_tokens: int
    readers: int = 0
    pulled: asyncio.Event = field(default_factory=asyncio.Event)


class NixlPrefill:
    """A Role that leases the blocks of computed prompts. `address` receives the pulls."""

    def __init__(self, ranks: Sequence[TransferRank]) -> None:
        self.address = ("", 0)
        self._ranks = ranks
        self._engine_ids = [f"{secrets.token_hex(8)}_dp{rank.number}" for rank in ranks]
        self._leases: dict[str, _Lease] = {}

    @property
    def leases(self) -> int:
        return len(self._leases)

    def parts(self, body: GenerationRequest, prompts: int) -> Sequence[_Prefill | None]:
        """Return parts as Role.parts does."""
        params = body.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            raise _wrong_role("do_remote_prefill", "decode")
        # As in vLLM, the blocks of all prompts are kept, and the answer only names those of the first.
        return [_Prefill(self) if params.get("do_remote_decode") else None for _ in range(prompts)]

    def start(self, rank: int, job: Job) -> Running:
        """Compute a prompt, and lease its blocks."""
        return _Prefilling(self, self._ranks[rank], job)

    def lease(self, rank: TransferRank, generation: Generation, first: Output) -> dict[str, Any]:
        """Keep the blocks of a finished request as a lease, and return the parameters for its answer."""
        assert first.token is not None
        lease = _Lease(
            secrets.token_hex(8),
            rank,
            generation.sequence,
            generation.sequence.blocks[: -(-generation.prompt_length // rank.settings.block_size)],
            generation.prompt_length,
            first.token,
            first.cached_tokens,
        )
        self._leases[lease.request_id] = lease
        rank.run(self._keep(lease))
        host, port = self.address
        return RemotePrefill(
            remote_engine_id=self._engine_ids[rank.number],
            remote_request_id=lease.request_id,
            remote_block_ids=lease.block_ids,
            remote_host=host,
            remote_port=port,
        ).model_dump()

    def pull(self, request: PullRequest) -> PullAnswer:
        """Write a lease's blocks to the receiver in a room. Raises ApiError."""
        lease = self._leases.get(request.request_id)
        if lease is None or request.engine_id != self._engine_ids[lease.rank.number]:
            message = (
                f"request_id {request.request_id!r}: these blocks do not exist here. Blocks are kept for {LEASE_S:g} s."
            )
            raise ApiError(HTTPStatus.NOT_FOUND, message, "request_id")
        if request.block_ids != lease.block_ids:
            raise ApiError(HTTPStatus.BAD_REQUEST, "block_ids: they differ from the leased ones.", "block_ids")
        try:
            sending = Sending(lease.rank, request.room, lease.prompt_tokens)
        except ValueError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error), "room") from error
        except RuntimeError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        sending.send_last(lease.sequence, lease.token, lease.cached_tokens)
        lease.readers += 1
        lease.rank.run(self._read(lease, sending))
        return PullAnswer(bootstrap_addr=lease.rank.bootstrap_addr, dp_rank=lease.rank.number)

    async def _read(self, lease: _Lease, sending: Sending) -> None:
        def ended(failure: str | None) -> None:
            if failure is None:
                lease.pulled.set()

        await sending.until_over(ended)
        lease.readers -= 1

    async def _keep(self, lease: _Lease) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S):
                await lease.pulled.wait()
        del self._leases[lease.request_id]
        await until(lambda: not lease.readers)
        lease.rank.engine.release(lease.sequence)


class NixlDecode:
    """A Role that pulls the blocks of prompts."""

    def __init__(self, ranks: Sequence[TransferRank]) -> None:
        self._ranks = ranks

    def parts(self, body: GenerationRequest, prompts: int) -> Sequence[Part | None]:
        """Return parts as Role.parts does."""
        params = body.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            raise _wrong_role("do_remote_decode", "prefill")
        if not params.get("do_remote_prefill"):
            return [None] * prompts
        try:
            source = RemotePrefill.model_validate(params)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = ".".join(["kv_transfer_params", *map(str, wrong["loc"])])
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{name}: {wrong['msg']}", name) from error
        first = _Decode(self._ranks, source)
        return [first, *[_FromFirst(self._ranks, first) for _ in range(prompts - 1)]]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A Part that is computed and leased."""

    role: NixlPrefill
    rank: int | None = None

    def start(self, rank: int, job: Job) -> Running:
        return self.role.start(rank, job)


@dataclass(slots=True)
class _Decode:
    """A Part whose KV is pulled for the first `job`. Further answers to its prompt are computed here."""

    ranks: Sequence[TransferRank]
    source: RemotePrefill
    rank: int | None = None
    job: Job | None = None

    def start(self, rank: int, job: Job) -> Running:
        on = self.ranks[rank]
        if self.job is not None:
            return on.engine.submit(job.prompt, job.answer, job.deliver, job.adapter, job.cache_salt)
        self.job = job
        on.engine.check_room()
        sequence = CachedSequence(list(job.prompt), job.adapter, job.cache_salt)
        return Arrival(on, sequence, job.answer, job.deliver, partial(_pull, on, self.source))


@dataclass(frozen=True, slots=True)
class _FromFirst:
    """A Part that is answered from the first prompt's KV, because vLLM applies `kv_transfer_params` to all prompts."""

    ranks: Sequence[TransferRank]
    first: _Decode
    rank: int | None = None

    def start(self, rank: int, job: Job) -> Running:
        taken = self.first.job
        assert taken is not None
        return self.ranks[rank].engine.submit(taken.prompt, taken.answer, job.deliver, job.adapter, job.cache_salt)


class _Prefilling:
    """A prompt that is computed and then leased: the engine's Handover, and a Running."""

    def __init__(self, role: NixlPrefill, rank: TransferRank, job: Job) -> None:
        self._role = role
        self._rank = rank
        self._deliver = job.deliver
        self._first: Output | None = None
        answer = Answer(job.answer.tokens[:1], "length")
        self._generation = rank.engine.submit(job.prompt, answer, self._take, job.adapter, job.cache_salt, self)

    def cancel(self) -> None:
        self._generation.cancel()

    def computed(self, generation: Generation) -> None:
        """Ignore the progress: blocks are sent only when they are pulled."""

    def finished(self, generation: Generation) -> None:
        if self._first is None:
            self._rank.engine.release(generation.sequence)
        else:
            params = self._role.lease(self._rank, generation, self._first)
            self._deliver(replace(self._first, kv_transfer_params=params))

    def _take(self, output: Output) -> None:
        if output.token is None:
            self._deliver(output)
        else:
            self._first = output


async def _pull(rank: TransferRank, source: RemotePrefill) -> KVReceiver:
    """Request a prefill's blocks, and return their receiver. Raises ArrivalError and ValueError."""
    room = secrets.randbelow(MAX_ROOM)
    asked = PullRequest(
        engine_id=source.remote_engine_id,
        request_id=source.remote_request_id,
        block_ids=source.remote_block_ids,
        room=room,
    )
    url = f"http://{join_host_port(source.remote_host, source.remote_port)}{PULL_PATH}"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PULL_TIMEOUT_S)) as session,
            session.post(url, json=asked.model_dump(), allow_redirects=False) as response,
        ):
            content = await response.read()
            if response.status != HTTPStatus.OK:
                raise ArrivalError(f"{url} answers {response.status}: {content[:500].decode(errors='replace')}")
            answer = PullAnswer.model_validate_json(content)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ArrivalError(f"{url}: {error or type(error).__name__}") from error
    return KVReceiver(rank.manager, answer.bootstrap_addr, room, prefill_dp_rank=answer.dp_rank)


def _wrong_role(asked: str, role: str) -> ApiError:
    message = f"kv_transfer_params.{asked} needs a {role} worker; this worker has another role."
    return ApiError(HTTPStatus.BAD_REQUEST, message, f"kv_transfer_params.{asked}")


routes = APIRouter()


@routes.post(PULL_PATH)
async def pull(body: PullRequest, request: Request) -> PullAnswer:
    role = request.app.state.worker.disaggregated.role
    assert isinstance(role, NixlPrefill)
    return role.pull(body)
