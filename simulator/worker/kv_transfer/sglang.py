"""Disaggregation as in SGLang: both workers receive the request with a room, the decode worker also the address.

The prefill worker answers with one token when the KV has landed. The decode worker answers from the received KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from kvevents.endpoints import join_host_port
from simulator.worker.cache import CachedSequence
from simulator.worker.engine import Answer, Generation, Output
from simulator.worker.kv_transfer.part import Job, Running
from simulator.worker.kv_transfer.rank import TransferRank
from simulator.worker.kv_transfer.transfers import Arrival, Sending
from simulator.worker.protocol import ApiError, GenerationRequest
from worker.kv_transfer import KVReceiver
from worker.kv_transfer.bootstrap import DEFAULT_PORT

_T = TypeVar("_T")


class SglangPrefill:
    """A Role that sends the KV of prompts to their rooms."""

    def __init__(self, ranks: Sequence[TransferRank]) -> None:
        self._ranks = ranks

    def parts(self, body: GenerationRequest, prompts: int) -> list[_Prefill]:
        """Return parts as Role.parts does. The room determines the DP rank."""
        parts = []
        for room in _rooms(body, prompts):
            rank = room % len(self._ranks)
            if body.routed_dp_rank not in (None, rank):
                message = f"routed_dp_rank {body.routed_dp_rank}: room {room} belongs to DP rank {rank}."
                raise ApiError(HTTPStatus.BAD_REQUEST, message, "routed_dp_rank")
            parts.append(_Prefill(self._ranks, room, rank))
        return parts


class SglangDecode:
    """A Role that receives the KV of prompts."""

    def __init__(self, ranks: Sequence[TransferRank]) -> None:
        self._ranks = ranks

    def parts(self, body: GenerationRequest, prompts: int) -> list[_Decode]:
        """Return parts as Role.parts does. A decode worker computes no prompt alone."""
        rooms = _rooms(body, prompts)
        hosts = _each(body.bootstrap_host, prompts, "bootstrap_host")
        ports = _each(body.bootstrap_port or DEFAULT_PORT, prompts, "bootstrap_port")
        rank = body.routed_dp_rank
        if rank is not None and not 0 <= rank < len(self._ranks):
            message = f"routed_dp_rank must be between 0 and {len(self._ranks) - 1}, not {rank}."
            raise ApiError(HTTPStatus.BAD_REQUEST, message, "routed_dp_rank")
        return [
            _Decode(self._ranks, room, join_host_port(host, port), body.disagg_prefill_dp_rank, rank)
            for room, host, port in zip(rooms, hosts, ports, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A Part that is computed and sent to a room."""

    ranks: Sequence[TransferRank]
    room: int
    rank: int

    def start(self, rank: int, job: Job) -> Running:
        return _Prefilling(self.ranks[rank], self.room, job)


@dataclass(frozen=True, slots=True)
class _Decode:
    """A Part whose KV is received in a room."""

    ranks: Sequence[TransferRank]
    room: int
    bootstrap_addr: str
    prefill_dp_rank: int | None
    rank: int | None

    def start(self, rank: int, job: Job) -> Running:
        on = self.ranks[rank]
        on.engine.check_room()

        async def meet() -> KVReceiver:
            return KVReceiver(on.manager, self.bootstrap_addr, self.room, prefill_dp_rank=self.prefill_dp_rank)

        return Arrival(on, CachedSequence(list(job.prompt), job.adapter, job.cache_salt), job.answer, job.deliver, meet)


class _Prefilling:
    """A prompt that is computed and sent chunk by chunk: the engine's Handover, and a Running."""

    def __init__(self, rank: TransferRank, room: int, job: Job) -> None:
        self._deliver = job.deliver
        self._first: Output | None = None
        self._computed = asyncio.Event()  # set when the engine has finished the prompt
        engine = rank.engine
        engine.check_room()  # checked before the room exists
        try:
            self._sending = Sending(rank, room, len(job.prompt))
        except ValueError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error), "bootstrap_room") from error
        except RuntimeError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        answer = Answer(job.answer.tokens[:1], "length")
        self._generation = engine.submit(job.prompt, answer, self._take, job.adapter, job.cache_salt, self)
        rank.run(self._run(rank))

    def cancel(self) -> None:
        self._sending.abort("the request was aborted")
        self._generation.cancel()

    def computed(self, generation: Generation) -> None:
        if generation.num_computed < generation.prompt_length:
            self._sending.send(generation.sequence, generation.num_computed)

    def finished(self, generation: Generation) -> None:
        if generation.finish_reason == "abort":
            self._sending.abort("the prefill's engine aborted the request")
        self._computed.set()

    def _take(self, output: Output) -> None:
        if output.token is not None:
            self._first = output
            self._sending.send_last(self._generation.sequence, output.token, output.cached_tokens)

    async def _run(self, rank: TransferRank) -> None:
        await self._sending.until_over(self._ended)
        await self._computed.wait()
        rank.engine.release(self._generation.sequence)

    def _ended(self, failure: str | None) -> None:
        self._generation.cancel()
        if failure is None and self._first is not None:
            self._deliver(self._first)
        else:
            self._deliver(Output(None, 0, "abort", failure))


def _rooms(body: GenerationRequest, prompts: int) -> list[int]:
    if body.n > 1:
        raise ApiError(HTTPStatus.BAD_REQUEST, "n must be 1: a room brings one answer.", "n")
    rooms = _each(body.bootstrap_room, prompts, "bootstrap_room")
    if len(set(rooms)) < len(rooms):
        raise ApiError(HTTPStatus.BAD_REQUEST, "bootstrap_room: each prompt needs a room of its own.", "bootstrap_room")
    return rooms


def _each(value: _T | list[_T] | None, prompts: int, field: str) -> list[_T]:
    """Return a field's value for each prompt, from a list or from one value for all. Raises ApiError."""
    if value is None:
        message = f"{field}: missing. A prefill or decode worker needs the address of the other worker."
        raise ApiError(HTTPStatus.BAD_REQUEST, message, field)
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{field}: {len(value)} values for {prompts} prompts.", field)
    return value
