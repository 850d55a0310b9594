"""A request router for Ray Serve: `request_router_class="kvrouter.adapters.ray.KVRouter"` (docs/ray.md, ray 2.60).

Ray makes one router for each handle of a deployment. All routers of a deployment ask one actor, which has the index and
the load. If it cannot choose, the replica with the fewest requests of this handle is used, and counted as a fallback.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Literal
from uuid import uuid4

import ray
import structlog
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Counter as RayCounter

from kvrouter.adapters.selector_thread import LoopThread
from kvrouter.adapters.shared_selector import BEAT_SECONDS, SILENT_SECONDS, ReplicaDescription, SharedSelector
from kvrouter.selection import NoWorker, Prompt, Stream
from router.apis.endpoints import CHAT, COMPLETIONS

log = structlog.get_logger()

STATS_KEY: Final = "kvrouter"
_NAMESPACE: Final = "kvrouter"
_RETRY_SECONDS: Final = 0.5
# The arguments with the ids of a prompt: Ray's own, vLLM's and SGLang's.
_IDS: Final = ("request_token_ids", "prompt_token_ids", "token_ids", "input_ids")


class SelectorUnreachableError(Exception):
    """The selector cannot choose now, so that no request waits for it."""


def replica_stats(
    *,
    block_size: int | None = None,
    capacity: int | None = None,
    streams: Sequence[Mapping[str, Any]] = (),
    adapters: Sequence[str] = (),
    dp_size: int = 1,
) -> dict[str, Any]:
    """Return what a deployment's `record_routing_stats` or `record_replica_metadata` returns.

    - `block_size`: tokens of a block.
    - `capacity`: the blocks of each rank's KV cache; None: not known.
    - `streams`: `{"endpoint": "tcp://...", "dp_rank": 0, "replay_endpoint": "tcp://..."}`. The host `*` or `0.0.0.0`
      is replaced by the address of this node. `dp_rank` and `replay_endpoint` are optional.
    - `adapters`: the LoRA adapters that it serves. Those of multiplexed requests are learned.
    - `dp_size`: the number of its DP ranks.
    """
    node = ray.util.get_node_ip_address()
    return {
        STATS_KEY: {
            "block_size": block_size,
            "capacity": capacity,
            "streams": [
                {name: _at(node, value) if "endpoint" in name else value for name, value in stream.items()}
                for stream in streams
            ],
            "adapters": list(adapters),
            "dp_size": dp_size,
        }
    }


def _at(node: str, endpoint: str) -> str:
    for anywhere in ("//*:", "//0.0.0.0:"):
        endpoint = endpoint.replace(anywhere, f"//{node}:")
    return endpoint


class _SelectorActor:
    """The actor that the routers of one deployment share. It ends when no router reports any more."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._shared = SharedSelector(model, settings)
        self._started: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        await self._shared.start()
        asyncio.get_running_loop().call_later(SILENT_SECONDS, self._check_handles)

    def _check_handles(self) -> None:
        if self._shared.silent():
            ray.kill(ray.get_runtime_context().current_actor)
        else:
            asyncio.get_running_loop().call_later(SILENT_SECONDS, self._check_handles)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the shared selector."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await asyncio.shield(self._started)
        return await getattr(self._shared, method)(*arguments)


class _Actor:
    """Calls the shared selector in its actor, which is created if it does not exist."""

    def __init__(self, name: str, model: str, settings: Mapping[str, Any]) -> None:
        self._arguments = name, model, settings
        self._actor = self._found()

    def _found(self) -> Any:
        name, model, settings = self._arguments
        options = {"name": name, "namespace": _NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        actor = ray.remote(_SelectorActor)
        return actor.options(num_cpus=0, max_restarts=-1, max_concurrency=10_000, **options).remote(model, settings)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and return its result."""
        return await self._actor.call.remote(method, *arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method without a wait for its end. Any thread may do this."""
        self._actor.call.remote(method, *arguments)

    def connect(self) -> None:
        """Find the actor again, or create another one, because it was lost."""
        self._actor = self._found()

    async def end(self) -> None:
        """Leave the actor, which ends when no handle reports any more."""


class _InProcess:
    """Calls a selector of this process alone, in a thread of its own."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._shared = SharedSelector(model, settings)
        self._thread = LoopThread()
        self._thread.run(self._shared.start())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and return its result."""
        return await asyncio.wrap_future(self._thread.submit(getattr(self._shared, method)(*arguments)))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method without a wait for its end. Any thread may do this."""
        self._thread.submit(getattr(self._shared, method)(*arguments)).add_done_callback(_log_error)

    def connect(self) -> None:
        """Keep the selector, which is never lost within its process."""

    async def end(self) -> None:
        """End the selector and its thread."""
        await asyncio.wrap_future(self._thread.submit(self._shared.close()))
        self._thread.close()


class KVRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to the replica that will answer it soonest, by its cached prefix and its load."""

    def initialize_state(
        self,
        *,
        tokenizer: str | None = None,
        settings: Mapping[str, Any] | None = None,
        state: Literal["actor", "process"] = "actor",
        timeout: float = 1.0,
        rank_argument: str | None = None,
    ) -> None:
        """Prepare the router. Ray calls it with `request_router_kwargs`.

        - `tokenizer`: a folder, or a name on the Hugging Face Hub, for prompts that are text; None: ids are needed.
        - `settings`: sections of kvrouter's settings.
        - `state`: "actor": all handles share the load; "process": this handle knows its own requests alone.
        - `timeout`: maximum seconds of a choice.
        - `rank_argument`: the keyword argument in which replicas receive the chosen DP rank; None: none.
        """
        if state not in ("actor", "process"):
            raise ValueError(f"state: {state!r} is neither 'actor' nor 'process'.")
        model = self._deployment_id.name
        sections = dict(settings or {})
        if tokenizer is not None:
            sections["models"] = {**sections.get("models", {}), model: {"tokenizer": tokenizer}}
        self._kv_model = model
        self._kv_handle = uuid4().hex
        self._kv_timeout = timeout
        self._kv_answers = False  # whether the selector answered the last report
        self._kv_rank_argument = rank_argument
        self._kv_known: dict[str, ReplicaDescription] = {}
        self._kv_requests: dict[str, str] = {}  # the replica of each request, by internal request id
        self._kv_in_flight: Counter[str] = Counter()
        self._kv_fallbacks = RayCounter(
            "kvrouter_ray_fallbacks_total",
            description="Requests sent to the replica with the fewest requests, because no choice was possible.",
            tag_keys=("deployment", "reason"),
        )
        name = f"selector:{self._deployment_id.app_name}:{model}"
        self._kv_selector = _InProcess(model, sections) if state == "process" else _Actor(name, model, sections)
        self._kv_beating = self._event_loop.create_task(_beat(weakref.ref(self)))

    # The replicas

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Describe new and changed replicas to the selector, and remove those that do not exist any more."""
        super().update_replicas(replicas)
        found = {each.replica_id.unique_id: _description(each) for each in replicas}
        for id, described in found.items():
            if self._kv_known.get(id) != described:
                self._kv_tell("upsert", self._kv_handle, id, described)
        for id in self._kv_known.keys() - found.keys():
            self._kv_tell("delete", id)
        self._kv_known = found
        for id in self._kv_in_flight.keys() - found.keys():
            if not self._kv_in_flight[id]:
                del self._kv_in_flight[id]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica whose actor died."""
        super().on_replica_actor_died(replica_id)
        self._kv_known.pop(replica_id.unique_id, None)
        self._kv_tell("delete", replica_id.unique_id)

    # The choice

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, and then the others by the requests of this handle."""
        left = list(self.select_available_replicas(candidate_replicas) or candidate_replicas)
        random.shuffle(left)
        left.sort(key=lambda replica: self._kv_in_flight[replica.replica_id.unique_id])
        if not left or pending_request is None:
            return [left] if left else []
        id = pending_request.metadata.internal_request_id
        self._kv_place(id, left[0].replica_id.unique_id)
        pending_request.future.add_done_callback(lambda future: self._kv_end(id) if future.cancelled() else None)
        try:
            chosen = await self._kv_choose(pending_request, left)
        except asyncio.CancelledError:
            self._kv_end(id)
            raise
        except Exception as error:
            self._kv_tell("release", id)
            chosen = left[0].replica_id.unique_id
            self._kv_fall_back(error)
        self._kv_place(id, chosen)
        left.sort(key=lambda replica: replica.replica_id.unique_id != chosen)
        return [left[:1], *([other] for other in left[1:])]

    async def _kv_choose(self, request: PendingRequest, replicas: list[RunningReplica]) -> str:
        """Return the id of the chosen replica. Raises an error if no choice is possible."""
        if not self._kv_answers:
            raise SelectorUnreachableError("The selector starts, or does not answer.")
        prompt = _prompt(request, self._kv_model)
        loaded = [each for each in replicas if prompt.adapter in each.multiplexed_model_ids] or replicas
        allowed = [each.replica_id.unique_id for each in loaded]
        id = request.metadata.internal_request_id
        async with asyncio.timeout(self._kv_timeout):
            chosen, rank, missing = await self._kv_selector.call("reserve", self._kv_handle, id, prompt, allowed)
        self._kv_describe(missing)
        if self._kv_rank_argument is not None:
            request.kwargs[self._kv_rank_argument] = rank
        return str(chosen)

    def _kv_fall_back(self, error: Exception) -> None:
        """Count a request for which no choice was possible, and mend the cause if it can be mended here."""
        cause = getattr(error, "cause", None) or error  # behind an error of the actor's method
        if isinstance(cause, ray.exceptions.RayActorError):
            self._kv_answers = False
        if isinstance(cause, NoWorker):
            self._kv_describe(self._kv_known)
        reason = type(cause).__name__
        self._kv_fallbacks.inc(tags={"deployment": self._kv_model, "reason": reason})
        log.warning("no choice, using the replica with the fewest requests", reason=f"{reason}: {cause}")

    def _kv_describe(self, ids: Iterable[str]) -> None:
        """Describe replicas to the selector, which does not know them."""
        for id in list(ids):
            if id in self._kv_known:
                self._kv_tell("upsert", self._kv_handle, id, self._kv_known[id])

    def _kv_tell(self, method: str, *arguments: Any) -> None:
        """Call the selector without a wait for its answer."""
        try:
            self._kv_selector.tell(method, *arguments)
        except Exception as error:
            log.warning("the selector was not reached", method=method, reason=str(error))

    # The requests in flight of this handle

    def _kv_place(self, id: str, replica: str) -> None:
        before = self._kv_requests.get(id)
        if before is not None:
            self._kv_in_flight[before] -= 1
        self._kv_requests[id] = replica
        self._kv_in_flight[replica] += 1

    def _kv_end(self, id: str) -> None:
        replica = self._kv_requests.pop(id, None)
        if replica is not None:
            self._kv_in_flight[replica] -= 1
            self._kv_tell("release", id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Reserve the load of a request at the replica that accepted it, if that is not the chosen one."""
        id, replica = pending_request.metadata.internal_request_id, replica_id.unique_id
        if self._kv_requests.get(id, replica) != replica:
            self._kv_place(id, replica)
            with suppress(ValueError):
                self._kv_tell("reserve", self._kv_handle, id, _prompt(pending_request, self._kv_model), [replica])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Release a request. A replica that rejected it reports this too, after another one was chosen."""
        if self._kv_requests.get(internal_request_id) == replica_id.unique_id:
            self._kv_end(internal_request_id)

    async def _kv_beat(self) -> None:
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                running, replicas = list(self._kv_requests), list(self._kv_known)
                known = await self._kv_selector.call("beat", self._kv_handle, running, replicas)
        except Exception as error:
            log.warning("the selector was not reached", method="beat", reason=repr(error))
            self._kv_answers = False
            self._kv_selector.connect()
        else:
            self._kv_describe(self._kv_known.keys() - set(known))
            self._kv_answers = True


async def _beat(router: weakref.ref[KVRouter]) -> None:
    """Report the requests of a router until nothing uses it any more. Then end its selector."""
    selector = None
    while (alive := router()) is not None:
        selector = alive._kv_selector
        await alive._kv_beat()
        seconds = BEAT_SECONDS if alive._kv_answers else _RETRY_SECONDS
        del alive
        await asyncio.sleep(seconds)
    if selector is not None:
        await selector.end()


def _log_error(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("the selector refused a report", reason=str(error))


def _description(replica: RunningReplica) -> ReplicaDescription:
    """Return what a replica reports. Reports that cannot be read count as none, and its cache is predicted."""
    reported = {**replica.replica_metadata, **(replica.routing_stats or {})}
    try:
        own = reported.get(STATS_KEY)
        if own is not None:
            streams = tuple(
                Stream(each.get("dp_rank", 0), each["endpoint"], each.get("replay_endpoint")) for each in own["streams"]
            )
            return ReplicaDescription(
                own["block_size"], own["capacity"], streams, tuple(own["adapters"]), own["dp_size"]
            )
        events = reported.get("kv_event_metadata")  # Ray's own, where each replica is one rank
        if events is not None:
            stream = Stream(0, events["endpoint"], events.get("replay_endpoint"))
            return ReplicaDescription(events["block_size"], streams=(stream,))
    except (AttributeError, KeyError, TypeError) as error:
        log.warning("report of a replica not read", replica=replica.replica_id.unique_id, reason=repr(error))
    return ReplicaDescription()


def _prompt(request: PendingRequest, model: str) -> Prompt:
    """Return the prompt in the arguments of a request. Raises ValueError without one."""
    metadata = request.metadata
    common: dict[str, Any] = {
        "model": model,
        "adapter": metadata.multiplexed_model_id or None,
        "session": metadata.session_id or None,
    }
    ids = next((request.kwargs[name] for name in _IDS if request.kwargs.get(name)), None)
    if ids is not None:
        return Prompt(token_ids=[int(each) for each in ids], **common)
    for argument in (*request.args, *request.kwargs.values()):
        fields = _fields(argument)
        ids = next((fields[name] for name in _IDS if fields.get(name)), None)
        text = fields.get("prompt")
        if ids is None and isinstance(text, list) and text and all(type(each) is int for each in text):
            ids = text
        if ids is not None and not isinstance(ids[0], list):
            return Prompt(token_ids=[int(each) for each in ids], **common)
        if fields.get("messages") or isinstance(text, str):
            path = CHAT if fields.get("messages") else COMPLETIONS
            return Prompt(body={**fields, "model": model}, path=path, **common)
    raise ValueError("No argument of the request has token ids, a prompt or messages.")


def _fields(argument: Any) -> Mapping[str, Any]:
    """Return the fields of a request's body: a mapping, or an object of pydantic."""
    if isinstance(argument, Mapping):
        return argument
    dump = getattr(argument, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) else {}
