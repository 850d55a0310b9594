"""Ask a worker what it is: its models, its event streams, its block size.

vLLM answers `/v1/models`, `/kv_event_sources` and `/metrics`; SGLang `/v1/models` and `/server_info`. Any other
OpenAI-compatible server answers `/v1/models` at least, and is routed to by load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import urlsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvevents import EventSource
from kvevents.curve import load_public_key
from kvevents.sources import sglang_sources, vllm_sources
from router.settings import Role, StreamSettings, WorkerSettings


class Engine(StrEnum):
    """What a worker runs, as far as routing must know."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    OTHER = "other"


_SGLANG_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


class DiscoveryError(Exception):
    """A worker could not be asked, or gave an answer that cannot be used."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that requests may use: the model behind it, and the adapter if the name is one's."""

    name: str
    model: str
    adapter: str | None = None
    root: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker said of itself. `models` by the name requests use, `block_size` in tokens, `capacity` in blocks."""

    engine: Engine
    models: dict[str, ServedModel]
    streams: tuple[EventSource, ...] = ()
    block_size: int | None = None
    capacity: int | None = None
    ranks: tuple[int, ...] = (0,)
    role: Role = Role.BOTH
    bootstrap_port: int | None = None

    def base_models(self) -> list[ServedModel]:
        """The models, without adapters and other names."""
        return [served for served in self.models.values() if served.name == served.model]


class _ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _SglangRole(msgspec.Struct):
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


async def describe_worker(session: aiohttp.ClientSession, worker: WorkerSettings) -> WorkerDescription:
    """Ask a worker; what its settings say wins. Raises DiscoveryError."""
    url = str(worker.url).rstrip("/")
    try:
        models = _models(await _get(session, f"{url}/v1/models"), worker.model)
        description = await _streams(session, url, models)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise DiscoveryError(f"{url}: {error or type(error).__name__}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise DiscoveryError(f"{url}: an answer that cannot be read: {error}") from error
    if worker.streams is not None:
        try:
            streams = tuple(map(_event_source, worker.streams))
        except ValueError as error:
            raise DiscoveryError(f"{url}: {error}") from error
        description = replace(description, streams=streams, ranks=_ranks(streams))
    if worker.block_size is not None:
        description = replace(description, block_size=worker.block_size)
    return description


async def _streams(session: aiohttp.ClientSession, url: str, models: dict[str, ServedModel]) -> WorkerDescription:
    """Find out which engine answers, and where its streams are."""
    host = urlsplit(url).hostname or ""
    if (sources := await _get_if_there(session, f"{url}/kv_event_sources")) is not None:
        streams = tuple(vllm_sources(msgspec.json.decode(sources), host))
        block_size, capacity = _vllm_cache(await _get_if_there(session, f"{url}/metrics") or "")
        return WorkerDescription(Engine.VLLM, models, streams, block_size, capacity, _ranks(streams))
    if (info := await _get_if_there(session, f"{url}/server_info")) is not None:
        found, block_size = sglang_sources(msgspec.json.decode(info), host)
        reported = msgspec.json.decode(info, type=_SglangRole)
        streams = tuple(found)
        return WorkerDescription(
            Engine.SGLANG,
            models,
            streams,
            block_size,
            ranks=_ranks(streams),
            role=_SGLANG_ROLES.get(reported.disaggregation_mode or "", Role.BOTH),
            bootstrap_port=reported.disaggregation_bootstrap_port,
        )
    return WorkerDescription(Engine.OTHER, models)


def _event_source(stream: StreamSettings) -> EventSource:
    path = stream.curve_server_key_file
    key = load_public_key(path, "curve_server_key_file") if path else None
    return EventSource(stream.dp_rank, stream.endpoint, stream.replay_endpoint, stream.topic, key)


def _ranks(streams: tuple[EventSource, ...]) -> tuple[int, ...]:
    return tuple(source.dp_rank for source in streams) or (0,)


def _models(body: str, only: str | None) -> dict[str, ServedModel]:
    """The names in `/v1/models`. Names with the same root are one model; an adapter has a parent."""
    cards = msgspec.json.decode(body, type=_ModelList).data
    first_of_root: dict[str, str] = {}
    for card in cards:
        if card.parent is None:
            first_of_root.setdefault(card.root or card.id, card.id)
    models = {}
    for card in sorted(cards, key=lambda card: card.parent is not None):
        if card.parent is None:
            model = first_of_root[card.root or card.id]
            models[card.id] = ServedModel(card.id, model, None, card.root, card.max_model_len)
        else:
            base = models.get(card.parent)
            length = card.max_model_len or (base.max_model_len if base else None)
            models[card.id] = ServedModel(card.id, base.model if base else card.parent, card.id, card.root, length)
    if only is None:
        return models
    first = next((model for model in models.values() if model.adapter is None), None)
    if first is None:
        return {only: ServedModel(only, only)}
    return {only: replace(first, name=only, model=only)}


def _vllm_cache(metrics: str) -> tuple[int | None, int | None]:
    """The block size and the number of blocks of a rank, from vLLM's metrics."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith("vllm:cache_config_info"):
                size, blocks = (sample.labels.get(name, "") for name in ("block_size", "num_gpu_blocks"))
                return int(size) if size.isdigit() else None, int(blocks) if blocks.isdigit() else None
    return None, None


async def _get_if_there(session: aiohttp.ClientSession, url: str) -> str | None:
    """None when the server has no such path. A server in trouble may have it: that is an error."""
    try:
        return await _get(session, url)
    except aiohttp.ClientResponseError as error:
        if error.status >= 500:
            raise
        return None


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    # A redirect would lead out of the allowed networks.
    async with session.get(url, allow_redirects=False) as response:
        response.raise_for_status()
        return await response.text()
