"""Discovery: the models, event streams and block size that a worker reports.

- vLLM answers `/v1/models`, `/kv_event_sources` and `/metrics`.
- SGLang answers `/v1/models`, `/server_info` and `/model_info`. Its encode servers have none of them.
- Other servers with the OpenAI API answer `/v1/models`. They receive requests by load only.

Each field of an answer is checked by itself. An invalid field is ignored and reported, and affects this worker only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

import aiohttp
import msgspec

from indexer.pools.layout import PoolLayout
from kvevents import EventSource
from kvevents.curve import load_public_key
from kvevents.decoding import read_json
from kvevents.sources import MOST_BLOCK_SIZE, ReportedFields, ReportedStreams, sglang_sources, vllm_sources
from router.apis.abilities import NO_ABILITIES, Ability, sglang_lacks
from router.fleet.hicache import hicache_layout
from router.fleet.worker_keys import WorkerKey
from router.http.client import connection_problem, read_answer
from router.http.worker_url import host_of
from router.settings import LONGEST_NAME, Role, StreamSettings, WorkerSettings

_SGLANG_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
# Maximum context of a model in tokens, and KV cache of a rank in blocks, that are believed.
_LONGEST_MODEL = 2**31
# Names that a worker may list, with its adapters, and its event streams: its DP ranks, for each of its models.
MOST_MODELS = 1000
MOST_RANKS = 1024
_MOST_BLOCKS = 2**40
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_CACHE_FIELDS = (
    re.compile(rb'(?:^|,)block_size="([0-9]{1,30})"'),
    re.compile(rb'(?:^|,)num_gpu_blocks="([0-9]{1,30})"'),
)
_MISSING = msgspec.Raw()
_TRUE = msgspec.Raw(b"true")
_NO_ENGINE = "is this the URL of an engine?"
# The owner of models in `/v1/models` of a kvrouter, and of a simulated worker.
OWN_MODELS = "kvrouter"


class Engine(StrEnum):
    """The inference engine of a worker."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    OTHER = "other"


# llm-d's label of a pod for its engine, and the label's older name. It counts if the engine's routes do not name it.
ENGINE_LABELS: Final = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
_LABELLED: Final = {"vllm": Engine.VLLM, "sglang": Engine.SGLANG}


class DiscoveryError(Exception):
    """A worker did not answer, or its answer cannot be used."""


class RefusedKeyError(DiscoveryError):
    """A worker requires an API key, or refuses the one that was sent."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that requests may use, with its base model and its adapter.

    - `root`: the origin of its weights.
    - `sent_as`: the name that the engine needs in requests for this adapter; None if it is `name`.
    """

    name: str
    model: str
    adapter: str | None = None
    root: str | None = None
    max_model_len: int | None = None
    sent_as: str | None = None


# Names and values of settings.
KvFormat: TypeAlias = tuple[tuple[str, str], ...]
_LONGEST_SIZE: Final = 16  # characters of a number


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The answer of a worker to a probe.

    - `models`: the served models and adapters, by the names that requests use.
    - `block_size`: the tokens of one block; None if not reported.
    - `capacity`: the blocks of each rank's KV cache; None if not reported.
    - `refused`: the fields that could not be used, in words.
    - `lacks`: the abilities that the engine reports not to have.
    - `pool_layout`: the layout of its objects in a shared pool; None if it reports none.
    - `kv_format`: settings that have to be equal in a prefill and a decode worker, as far as it reports them.
    """

    engine: Engine
    models: dict[str, ServedModel]
    streams: tuple[EventSource, ...] = ()
    block_size: int | None = None
    capacity: int | None = None
    ranks: tuple[int, ...] = (0,)
    role: Role = Role.BOTH
    bootstrap_port: int | None = None
    refused: tuple[str, ...] = ()
    lacks: frozenset[Ability] = NO_ABILITIES
    pool_layout: PoolLayout | None = None
    kv_format: KvFormat = ()

    def base_models(self) -> list[ServedModel]:
        """Return the models, without adapters and additional names."""
        return [served for served in self.models.values() if served.name == served.model]


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class _ModelCard(msgspec.Struct):
    id: msgspec.Raw
    root: msgspec.Raw = msgspec.Raw()
    parent: msgspec.Raw = msgspec.Raw()
    max_model_len: msgspec.Raw = msgspec.Raw()
    owned_by: msgspec.Raw = msgspec.Raw()


class _SglangServer(msgspec.Struct):
    served_model_name: msgspec.Raw = msgspec.Raw()
    tokenizer_path: msgspec.Raw = msgspec.Raw()
    disaggregation_mode: msgspec.Raw = msgspec.Raw()
    disaggregation_bootstrap_port: msgspec.Raw = msgspec.Raw()
    disaggregation_transfer_backend: msgspec.Raw = msgspec.Raw()
    kv_cache_dtype: msgspec.Raw = msgspec.Raw()
    page_size: msgspec.Raw = msgspec.Raw()
    encoder_only: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class _Card:
    id: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    may_be_router: bool


async def describe_worker(
    session: aiohttp.ClientSession,
    worker: WorkerSettings,
    key: WorkerKey | None = None,
) -> WorkerDescription:
    """Ask a worker for its description, which its settings override.

    Raises DiscoveryError; RefusedKeyError if the worker refuses the key, by default that of the settings.
    """
    url = str(worker.url).rstrip("/")
    key = key or WorkerKey(worker.name or url, worker)
    name = key.name
    client = _WorkerClient(session, url, key)
    try:
        cards = client.cards(await client.get("/v1/models"))
        if all(card.may_be_router for card in cards) and await client.is_router():
            raise DiscoveryError(f"{name}: a kvrouter answers there, not an engine: name the workers behind it")
        models = _models(cards, worker.model)
        description = await _streams(client, models, named=worker.model is not None)
    except aiohttp.ClientResponseError as error:
        if client.key.refuses(error.status):
            raise RefusedKeyError(client.key.refusal(error.request_info.url.path, error.status)) from error
        if error.status == 404 and await client.is_encoder():
            return WorkerDescription(Engine.SGLANG, {}, role=Role.ENCODE)
        path = error.request_info.url.path
        hint = f"; {_NO_ENGINE}" if error.status == 404 else ""
        raise DiscoveryError(f"{name}: {path} returns {error.status} {error.message}{hint}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise DiscoveryError(f"{name}: {connection_problem(error)}") from error
    except msgspec.DecodeError as error:
        raise DiscoveryError(f"{name}: its answer is not the JSON of an engine; {_NO_ENGINE}") from error
    except ValueError as error:
        raise DiscoveryError(f"{name}: invalid answer: {error}") from error
    if description.engine is Engine.OTHER:
        description = replace(description, engine=_LABELLED.get(engine_label(worker), Engine.OTHER))
    if worker.streams is not None:
        try:
            streams = tuple(map(_event_source, worker.streams))
        except ValueError as error:
            raise DiscoveryError(f"{name}: {error}") from error
        description = replace(description, streams=streams, ranks=_ranks([source.dp_rank for source in streams]))
    if worker.block_size is not None:
        description = replace(description, block_size=worker.block_size)
    return replace(description, refused=tuple(client.fields.refused))


def engine_label(worker: WorkerSettings) -> str:
    """Return the engine of a worker by the label of its pod; "" without one."""
    return next((worker.labels[label] for label in ENGINE_LABELS if label in worker.labels), "")


class _WorkerClient:
    """The HTTP client of one worker, with the fields of its answers that could not be used."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: WorkerKey) -> None:
        self.host = host_of(url)
        self.key = key
        self.fields = ReportedFields()
        self._session = session
        self._url = url

    async def get(self, path: str) -> bytes:
        """Return the body at a path. Raises ClientError for an error status, ValueError for a body that is too long."""
        async with self._session.get(self._url + path, headers=self.key.headers, allow_redirects=False) as response:
            self.key.record_status(path, response.status)
            response.raise_for_status()
            return await read_answer(response)

    async def get_if_there(self, path: str) -> bytes | None:
        """Return the body at a path; None if it does not exist. Raises ClientError for a status of 500 or more."""
        try:
            return await self.get(path)
        except aiohttp.ClientResponseError as error:
            if error.status >= 500:
                raise
            return None

    async def is_router(self) -> bool:
        """Return whether a kvrouter answers, by its /health."""
        try:
            return b'"workers_up":' in await self.get("/health")
        except aiohttp.ClientResponseError:
            return False

    async def is_encoder(self) -> bool:
        """Return whether an encode server of SGLang answers, by a path that no other server has."""
        try:
            await self.get("/scheduler_receive_url")
        except aiohttp.ClientResponseError as error:
            return error.status == 405  # the path exists, for POST
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        return False

    def cards(self, body: bytes) -> list[_Card]:
        """Parse the answer to `/v1/models`. Raises ValueError without a usable name, and above `MOST_MODELS`."""
        listed = read_json(body, _ModelList).data
        if len(listed) > MOST_MODELS:
            raise ValueError(f"/v1/models lists {len(listed)} names, more than {MOST_MODELS}")
        cards = [card for raw in listed if (card := self._card(raw)) is not None]
        if listed and not cards:
            raise ValueError("; ".join(self.fields.refused) or "/v1/models lists no model name")
        return cards

    def _card(self, raw: msgspec.Raw) -> _Card | None:
        fields = self.fields
        given = fields.struct("/v1/models: data[…]", raw, _ModelCard)
        name = fields.text("/v1/models: id", given.id, LONGEST_NAME) if given else None
        if given is None or not name:
            return None
        parent = fields.text("/v1/models: parent", given.parent, LONGEST_NAME)
        if parent is None and bytes(given.parent) not in (b"", b"null"):
            return None  # The card is an adapter of an unknown model.
        return _Card(
            name,
            fields.text("/v1/models: root", given.root),
            parent,
            fields.integer("/v1/models: max_model_len", given.max_model_len, 1, _LONGEST_MODEL),
            bytes(given.owned_by) == b'"%b"' % OWN_MODELS.encode(),
        )


async def _streams(client: _WorkerClient, models: dict[str, ServedModel], named: bool) -> WorkerDescription:
    """Detect the engine, and return the description with its streams. `named`: the settings name its model."""
    fields = client.fields
    if (sources := await client.get_if_there("/kv_event_sources")) is not None:
        streams = _within(vllm_sources(sources, client.host, fields, MOST_RANKS), models, client)
        block_size, capacity = _vllm_cache(await client.get_if_there("/metrics") or b"", fields)
        ranks = _ranks(streams.ranks)
        return WorkerDescription(Engine.VLLM, models, tuple(streams.sources), block_size, capacity, ranks)
    if (info := await client.get_if_there("/server_info")) is not None:
        found = sglang_sources(info, client.host, fields, MOST_RANKS)
        streams = _within(found, models, client)
        given = read_json(info, _SglangServer)
        mode = fields.text("disaggregation_mode", given.disaggregation_mode)
        role = Role.ENCODE if given.encoder_only == _TRUE else _SGLANG_ROLES.get(mode or "", Role.BOTH)
        model_info = await client.get_if_there("/model_info") or await client.get_if_there("/get_model_info")
        return WorkerDescription(
            Engine.SGLANG,
            _of_sglang(
                models,
                fields.text("tokenizer_path", given.tokenizer_path),
                None if named else fields.text("served_model_name", given.served_model_name, LONGEST_NAME),
            ),
            tuple(streams.sources),
            found.block_size,
            ranks=_ranks(streams.ranks),
            role=role,
            bootstrap_port=fields.integer(
                "disaggregation_bootstrap_port", given.disaggregation_bootstrap_port, 1, 65535
            ),
            lacks=sglang_lacks(info, model_info),
            pool_layout=hicache_layout(info, fields),
            kv_format=() if role is Role.BOTH else _sglang_kv_format(given, fields),
        )
    return WorkerDescription(Engine.OTHER, models)


def _sglang_kv_format(server: _SglangServer, fields: ReportedFields) -> KvFormat:
    """Return what SGLang's decode workers compare with their prefill worker's, and the backend of the transfer."""
    found = {
        "page_size": bytes(server.page_size).decode(errors="replace")[:_LONGEST_SIZE],
        "kv_cache_dtype": fields.text("kv_cache_dtype", server.kv_cache_dtype),
        "disaggregation_transfer_backend": fields.text(
            "disaggregation_transfer_backend", server.disaggregation_transfer_backend
        ),
    }
    return tuple((name, value) for name, value in found.items() if value)


def _within(streams: ReportedStreams, models: dict[str, ServedModel], client: _WorkerClient) -> ReportedStreams:
    """Return the streams, or no streams if they exceed `MOST_RANKS`. Each is followed for each model."""
    count = len(streams.ranks) * len({model.model for model in models.values()})
    if count <= MOST_RANKS:
        return streams
    client.fields.refuse("ranks", f"{count} for all models, more than {MOST_RANKS}")
    return ReportedStreams()


def _event_source(stream: StreamSettings) -> EventSource:
    path = stream.curve_server_key_file
    key = load_public_key(path, "curve_server_key_file") if path else None
    return EventSource(stream.dp_rank, stream.endpoint, stream.replay_endpoint, stream.topic, key)


def _ranks(ranks: list[int]) -> tuple[int, ...]:
    return tuple(ranks) or (0,)


def _models(cards: list[_Card], only: str | None) -> dict[str, ServedModel]:
    """Return the served names, or the one of `only`. Names with one root are one model; adapters have a parent."""
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


def _of_sglang(models: dict[str, ServedModel], folder: str | None, started_as: str | None) -> dict[str, ServedModel]:
    """Return the models with what SGLang's `/v1/models` does not say.

    - The `root` of a base model is the name that it serves. `folder` is where its files are.
    - New weights from disk change the listed name to their path. It was `started_as` another name, and answers to both.
    - An adapter NAME is applied only for `BASE:NAME`. For other names the base model answers.
    """
    bases = [served.name for served in models.values() if served.adapter is None]
    renamed = started_as if started_as and started_as not in models and len(bases) == 1 else None
    named = {}
    for name, served in models.items():
        if renamed:
            served = replace(served, model=renamed)
        if served.adapter is None:
            named[name] = replace(served, root=folder) if folder and served.root == name else served
            if renamed:
                named[renamed] = replace(named[name], name=renamed)
            continue
        qualified = f"{served.model}:{served.adapter}"
        named[name] = replace(served, sent_as=qualified)
        named[qualified] = replace(served, name=qualified)
    return named


def _vllm_cache(metrics: bytes, fields: ReportedFields) -> tuple[int | None, int | None]:
    """Return the block size and the number of blocks of a rank from vLLM's metrics."""
    config = _CACHE_CONFIG.search(metrics)
    if config is None:
        return None, None
    size, blocks = (msgspec.Raw(found[1]) if (found := each.search(config[1])) else _MISSING for each in _CACHE_FIELDS)
    return (
        fields.integer("block_size", size, 1, MOST_BLOCK_SIZE),
        fields.integer("num_gpu_blocks", blocks, 0, _MOST_BLOCKS) or None,
    )
