"""Dynamo's selection service over kvrouter's choice: its requests, answers and errors (ai-dynamo-runtime 1.6.1).

Requests and answers are the JSON of Dynamo's HTTP routes. Two fields are kvrouter's own:

- `expiry`: the seconds without a report after which a reservation ends. Each report starts this time again.
- `url`: where to send the request; null if the worker's endpoint is no HTTP URL.

Workers that the router knows otherwise, such as those of its settings, may be chosen too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import uuid4

import xxhash

from http_api.errors import RequestError
from indexer import Indexer, MatchQuery
from kvevents import Tier
from router.apis.agent_hints import AgentHints
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest, TokenPrompts
from router.fleet.worker import Worker
from router.policies import Candidate
from router.reservations.kept_selections import KeptSelections
from router.reservations.reservations import Reservation, Reservations
from router.reservations.selection_bodies import (
    OutputBlockBody,
    PromptBody,
    ReservationBody,
    SelectBody,
    SessionBody,
    bad_request,
    check_hashes,
    not_found,
    read_body,
    unavailable,
)
from router.reservations.worker_catalogue import Member, Members, WorkerCatalogue, http_url_of
from router.routing.assignment import Selection
from router.routing.build import Routing
from router.routing.prompt_reader import BYTES_PER_TOKEN

_SEED: Final = 1337  # of Dynamo's hashes


class SelectionService:
    """Answers the requests of Dynamo's selection service. One event loop uses it.

    Its methods take the JSON of a body, or a decoded body, and return the answer. They raise RequestError with Dynamo's
    status. `workers`: the workers that may be chosen.
    """

    def __init__(
        self,
        indexer: Indexer,
        routing: Routing,
        reservations: Reservations,
        workers: WorkerCatalogue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = workers
        self._indexer = indexer
        self._routing = routing
        self._reservations = reservations
        self._selected = KeptSelections(clock)

    # The choice

    async def select(self, body: Any) -> dict[str, Any]:
        """Return the choice for a prompt. With a `selection_id`, it may be reserved for 120 seconds."""
        asked = read_body(body, SelectBody)
        request, members, excluded = await self._asked(asked)
        selection = await self._reservations.select(request, excluded)
        member = members.of_worker[selection.worker]
        answer = self._answer(asked, request, selection, member)
        if asked.selection_id is not None:
            answer = {"selection_id": asked.selection_id} | answer
            self._selected.keep(asked.selection_id, asked, member.id, selection.rank.target.dp_rank)
        if asked.advisory:
            load = selection.rank.load
            answer["worker_load"] = {"active_prefill_tokens": load.pending + load.peers.pending}
            capacity = member.record.max_num_batched_tokens if member.record is not None else None
            answer["worker_load"]["prefill_token_capacity"] = capacity or 10_000_000
        return answer

    async def select_and_reserve(self, body: Any) -> dict[str, Any]:
        """Return the choice for a prompt, and reserve its load in the same step."""
        asked = read_body(body, SelectBody)
        id = str(uuid4()) if asked.selection_id is None else asked.selection_id
        request, members, excluded = await self._asked(asked)
        held = await self._reserve(id, request, excluded, asked.expiry, wait=asked.wait)
        member = members.of_worker.get(held.worker)
        if member is None:  # added while the request waited
            held.drop()
            raise unavailable("no endpoints available to route work")
        answer = self._answer(asked, request, held.selection, member, reserved=True)
        assert asked.token_ids is not None
        first = {
            "selection_id": id,
            "sequence_hashes": sequence_hashes(asked.token_ids, answer["block_size"]),
            "isl_tokens": request.tokens,
            "track_prefill_tokens": True,
        }
        return first | answer | {"expiry": held.expiry}

    async def create_reservation(self, body: Any) -> dict[str, Any]:
        """Reserve what `select` chose for the `selection_id`, or a given worker, whatever its load."""
        asked = read_body(body, ReservationBody)
        if asked.worker_id is None:
            return await self._reserve_selected(asked)
        members = self.workers.members(asked)
        member = members.of_id.get(asked.worker_id)
        where = f"model={asked.model_name} routing_group={asked.routing_group}"
        if member is None:
            raise not_found(f"schedulable worker {asked.worker_id} not found for {where}")
        request = await self._prompt(asked, by_hashes=True)
        if asked.effective_prefill_tokens is not None and asked.effective_prefill_tokens > _length(asked):
            tokens = asked.effective_prefill_tokens
            raise bad_request(f"effective_prefill_tokens ({tokens}) must not exceed isl_tokens ({_length(asked)})")
        return await self._reserve_at(asked, member, asked.dp_rank, members, request, asked.expiry)

    async def prefill_complete(self, id: str) -> None:
        """End the prefill of a reservation. Repeats have no effect."""
        self._held(id).first_token()

    def add_output_block(self, id: str, body: Any = b"") -> None:
        """Report one more block of an answer, which also starts the `expiry` of its reservation again."""
        fraction = read_body(body or b"{}", OutputBlockBody).decay_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            raise bad_request("decay_fraction must be between 0.0 and 1.0")
        held = self._held(id)
        target = held.selection.rank.target
        held.progress(held.output_tokens + (self._indexer.block_size(target) or 1))

    async def free_reservation(self, id: str) -> None:
        """Release a reservation."""
        self._held(id).release()

    # Reports

    async def overlap_scores(self, body: Any) -> dict[str, Any]:
        """Return the blocks of a prompt that each worker has cached, by its events."""
        asked = read_body(body, PromptBody)
        members = self.workers.members(asked)
        await self._prompt(asked)
        tokens = asked.token_ids or []
        size = self.workers.block_size(next(iter(members.of_worker)))
        # One token more, because an engine never reuses the block with a prompt's last token.
        query = MatchQuery(asked.model_name, [*tokens, 0], asked.lora_name, asked.cache_salt)
        held = {match.target: match.tiers for match in self._indexer.match(query)}
        workers = []
        for worker, member in members.of_worker.items():
            block = self.workers.block_size(worker)
            for dp_rank in worker.ranks():
                tiers = held.get(worker.target(dp_rank, asked.model_name), {})
                gpu, cpu, disk = (tiers.get(tier, 0) // block for tier in (Tier.GPU, Tier.CPU, Tier.DISK))
                workers.append(
                    {
                        "worker_id": member.id,
                        "dp_rank": dp_rank,
                        "device_blocks": gpu,
                        "host_pinned_blocks": gpu + cpu,
                        "disk_blocks": gpu + cpu + disk,
                        "host_pinned_extension_blocks": cpu,
                        "disk_extension_blocks": disk,
                        "shared_beyond_device_blocks": None,
                    }
                )
        shared = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        return {"block_size": size, "num_blocks": len(tokens) // size, "workers": workers, "shared_cache": shared}

    async def potential_loads(self, body: Any) -> list[dict[str, Any]]:
        """Return the load that each worker would have with a prompt."""
        asked = read_body(body, PromptBody)
        members = self.workers.members(asked)
        request = await self._prompt(asked)
        selection = await self._reservations.select(request, members.others)
        candidates = {candidate.target: candidate for candidate in selection.decision.candidates}
        found = []
        for worker, member in members.of_worker.items():
            for dp_rank in worker.ranks():
                candidate = candidates.get(worker.target(dp_rank, asked.model_name))
                reused = 0 if candidate is None else candidate.reused
                found.append(self._load(member, dp_rank, max(request.tokens - reused, 0), request.tokens))
        return found

    def loads(self, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Return the load of each worker, by model and routing group."""
        partitions = {(record.model_name, record.routing_group): None for record in self.workers.all_records()}
        found = []
        for model, group in partitions:
            if model_name not in (None, model) or routing_group not in (None, group):
                continue
            members = self.workers.found_members(model, group)
            loads = [
                self._load(member, dp_rank)
                for worker, member in members.of_worker.items()
                for dp_rank in worker.ranks()
            ]
            found.append(
                {
                    "model_name": model,
                    "routing_group": group,
                    "loads": loads,
                    "pending_count": 0,
                    "pending_isl_tokens": 0,
                }
            )
        return found

    # Prompts and reservations

    async def _asked(self, asked: SelectBody) -> tuple[RoutedRequest, Members, list[Worker]]:
        """Return a request as routing reads it, the workers of its partition, and the workers to exclude."""
        members = self.workers.members(asked)
        request = await self._prompt(asked)
        allowed = list(members.of_id.values())
        if asked.pinned_worker is not None:
            allowed = [member for member in allowed if member.id == asked.pinned_worker.worker_id]
            request.dp_rank = asked.pinned_worker.dp_rank
            if not any(asked.pinned_worker.dp_rank in member.worker.ranks() for member in allowed):
                allowed = []
        if asked.allowed_worker_ids is not None:
            ids = set(asked.allowed_worker_ids)
            allowed = [member for member in allowed if member.id in ids]
        if required := set(asked.routing_constraints.required_taints):
            allowed = [member for member in allowed if required <= member.taints]
        if not allowed:
            raise unavailable("no endpoints available to route work")
        excluded = members.others if len(allowed) == len(members.of_id) else members.without(allowed)
        self._describe(request, asked)
        return request, members, excluded

    @staticmethod
    def _describe(request: RoutedRequest, asked: SelectBody) -> None:
        """Set what a body says of a request's session, answer and priority."""
        session = asked.session_context
        if session is None and asked.session_id is not None:
            session = SessionBody(asked.session_id)
        if session is not None and session.session_id:
            request.identity = Identity(session.session_id, None, session.parent_session_id)
            request.session = session.session_id
        final = None if session is None else session.session_final
        if asked.expected_output_tokens is not None or final is not None:
            request.hints = AgentHints(asked.expected_output_tokens, None, final)
        request.priority = -(asked.strict_priority or 0)

    async def _prompt(self, asked: PromptBody, by_hashes: bool = False) -> RoutedRequest:
        """Return a prompt as routing reads it. `by_hashes`: whether hashes suffice, because nothing is matched."""
        if any(info is not None for info in asked.block_mm_infos or ()):
            raise bad_request("block_mm_infos: prompts with media are not supported. Leave them out.")
        name = (
            asked.model_name
            if asked.lora_name is None
            else await self.workers.adapter_name(asked.model_name, asked.lora_name)
        )
        if asked.token_ids is not None:
            request = RoutedRequest(name, TokenPrompts([asked.token_ids], param="token_ids"), streamed=True)
            if not asked.token_ids:
                request.prompt = None
        else:
            check_hashes(asked, by_hashes)
            if not by_hashes:
                raise bad_request("token_ids is required: block hashes of other routers cannot be matched")
            request = RoutedRequest(name, streamed=True)
        request.cache_salt = asked.cache_salt
        return request

    async def _reserve_selected(self, asked: ReservationBody) -> dict[str, Any]:
        where = asked.model_name, asked.routing_group
        kept = self._selected.get(asked.selection_id, *where)
        if kept is None:
            raise not_found(
                f"no pending selection {asked.selection_id} for model={where[0]} routing_group={where[1]} "
                "(expired, already used, or never selected)"
            )
        members = self.workers.members(asked)
        member = members.of_id.get(kept.member)
        if member is None:
            raise not_found(f"schedulable worker {kept.member} not found")
        selected = kept.request()
        request = await self._prompt(selected)
        self._describe(request, selected)
        return await self._reserve_at(asked, member, kept.dp_rank, members, request, selected.expiry)

    async def _reserve_at(
        self,
        asked: ReservationBody,
        member: Member,
        dp_rank: int | None,
        members: Members,
        request: RoutedRequest,
        expiry: float,
    ) -> dict[str, Any]:
        """Reserve a rank of a worker, whatever its load."""
        if dp_rank is not None and dp_rank not in member.worker.ranks():
            raise not_found(f"worker {member.id} has no dp_rank {dp_rank}")
        request.dp_rank = dp_rank
        excluded = members.without([member])
        size = (asked.isl_tokens or 0) * BYTES_PER_TOKEN
        held = await self._reserve(asked.selection_id, request, excluded, expiry, size=size, limited=False)
        self._selected.drop(asked.selection_id)
        return {
            "selection_id": held.id,
            "model_name": asked.model_name,
            "routing_group": asked.routing_group,
            "worker_id": member.id,
            "dp_rank": held.selection.rank.target.dp_rank,
            "endpoint": member.endpoint,
            "url": http_url_of(member.endpoint),
            "expiry": held.expiry,
        }

    async def _reserve(
        self,
        id: str,
        request: RoutedRequest,
        excluded: list[Worker],
        expiry: float,
        wait: float = 0.0,
        size: int = 0,
        limited: bool = True,
    ) -> Reservation:
        try:
            return await self._reservations.reserve(
                request, id, excluded, wait=wait, size=size, expiry=expiry, limited=limited
            )
        except RequestError as error:
            if error.status == 409:
                error.message = f"selection {id} is already reserved or being reserved"
            raise

    def _held(self, id: str) -> Reservation:
        held = self._reservations.get(id)
        if held is None:
            raise not_found(f"reservation {id} not found")
        return held

    # Answers

    def _answer(
        self, asked: SelectBody, request: RoutedRequest, selection: Selection, member: Member, reserved: bool = False
    ) -> dict[str, Any]:
        chosen, rank = selection.decision.chosen, selection.rank
        block = self._indexer.block_size(rank.target) or self.workers.block_size(member.worker)
        if len(member.worker.ranks()) == 1:
            by_rank = {str(rank.target.dp_rank): _gpu(chosen)}
        else:
            by_rank = {
                str(each.target.dp_rank): _gpu(each)
                for each in selection.decision.candidates
                if each.target.worker == rank.target.worker
            }
        context = rank.load.context + rank.load.peers.context + (0 if reserved else request.tokens)
        return {
            "model_name": asked.model_name,
            "routing_group": asked.routing_group,
            "worker_id": member.id,
            "dp_rank": rank.target.dp_rank,
            "endpoint": member.endpoint,
            "url": http_url_of(member.endpoint),
            "block_size": block,
            "overlap": {
                "longest_matched": chosen.overlap,
                "gpu": _gpu(chosen),
                "dp": by_rank,
                "cpu": chosen.overlap - chosen.disk,
                "disk": chosen.overlap,
            },
            "effective_prefill_tokens": max(request.tokens - selection.reused, 0),
            "potential_decode_blocks": -(-context // block),
        }

    def _load(self, member: Member, dp_rank: int, more_prefill: int = 0, more: int = 0) -> dict[str, Any]:
        load = self._routing.state.load.of(member.worker.url, dp_rank)
        block = self.workers.block_size(member.worker)
        return {
            "worker_id": member.id,
            "dp_rank": dp_rank,
            "potential_prefill_tokens": load.pending + load.peers.pending + more_prefill,
            "potential_decode_blocks": -(-(load.context + load.peers.context + more) // block),
            "active_requests": load.requests + int(load.peers.requests),
        }


def sequence_hashes(tokens: Sequence[int], block: int) -> list[int]:
    """Return Dynamo's hashes of a prompt's blocks without adapter and salt, as signed numbers."""
    hashes: list[int] = []
    parent = b""
    data = b"".join([token.to_bytes(4, "little") for token in tokens])
    for start in range(0, len(data) - 4 * block + 1, 4 * block):
        own = xxhash.xxh3_64_intdigest(data[start : start + 4 * block], _SEED)
        if parent:
            own = xxhash.xxh3_64_intdigest(parent + own.to_bytes(8, "little"), _SEED)
        parent = own.to_bytes(8, "little")
        hashes.append(int.from_bytes(parent, "little", signed=True))
    return hashes


def _length(asked: PromptBody) -> int:
    return (asked.isl_tokens or 0) if asked.token_ids is None else len(asked.token_ids)


def _gpu(candidate: Candidate) -> int:
    return candidate.overlap - candidate.cpu - candidate.disk
