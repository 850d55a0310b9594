"""The bootstrap service's table of a prefill instance's ranks, and the forms of a registration.

A registration has a rank's topology, position and address. Ranks of this project repeat it as a heartbeat, and expire
after two missed heartbeats. Ranks of engines without heartbeats stay until they are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvevents.decoding import read_json
from kvevents.endpoints import join_host_port, split_host_port
from worker.kv_transfer.ranks import Rank, Topology

HEARTBEATS_MISSED = 2

_Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_RankNumber = Annotated[int, msgspec.Meta(ge=0, le=4095)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]


class RegistryError(Exception):
    """A request that cannot be fulfilled: the HTTP status, the invalid field if any, and advice."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class _Body(msgspec.Struct, kw_only=True):
    """The fields of both generations of engines. `instance` and `heartbeat_s` are our additions."""

    rank_ip: _Host
    rank_port: _Port
    role: str = "Prefill"
    page_size: _Size | None = None
    kv_cache_dtype: _Name | None = None
    kv_layout: _Name | None = None
    instance: _Name = ""
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] | None = None


class _EngineRankBody(_Body):
    """The first generation: one number that counts ranks over all DP ranks."""

    tp_size: _Size
    engine_rank: _RankNumber
    dp_size: _Size = 1


class _AttentionRankBody(_Body):
    """The later generation: one number for each kind of parallelism. Either kind of DP may be used."""

    attn_tp_size: _Size
    attn_tp_rank: _RankNumber
    attn_cp_size: _Size = 1
    attn_cp_rank: _RankNumber = 0
    attn_dp_size: _Size = 1
    attn_dp_rank: _RankNumber = 0
    pp_size: _Size = 1
    pp_rank: _RankNumber = 0
    system_dp_size: _Size = 1
    system_dp_rank: _RankNumber = 0


@dataclass(frozen=True, slots=True)
class Registration:
    topology: Topology
    rank: Rank
    host: str
    port: int
    page_size: int | None
    kv_cache_dtype: str | None
    kv_layout: str | None
    instance: str
    heartbeat_s: float | None


def read_registration(data: bytes) -> Registration:
    """Parse the body of `PUT /route`, of either generation. Raises RegistryError, which names the field."""
    try:
        fields = read_json(data, dict[str, Any])
        first_generation = "engine_rank" in fields and "attn_tp_size" not in fields
        kind: type[_EngineRankBody | _AttentionRankBody]
        kind = _EngineRankBody if first_generation else _AttentionRankBody
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`") or None
        raise RegistryError(400, f"{field}: {text}" if field else text, field) from error
    except msgspec.DecodeError as error:
        raise RegistryError(400, f"the body is not JSON: {error}") from error
    if body.role != "Prefill":
        raise RegistryError(400, f"role {body.role!r}: only ranks with role 'Prefill' register", "role")
    topology, rank = _engine_place(body) if isinstance(body, _EngineRankBody) else _attention_place(body)
    for name, size, number in zip(("dp", "cp", "tp", "pp"), topology, rank, strict=True):
        if number >= size:
            raise RegistryError(400, f"{name} rank {number} does not exist: the {name} size is {size}", f"{name}_rank")
    return Registration(
        topology,
        rank,
        body.rank_ip.removeprefix("[").removesuffix("]"),
        body.rank_port,
        body.page_size,
        body.kv_cache_dtype,
        body.kv_layout,
        body.instance,
        body.heartbeat_s,
    )


def _engine_place(body: _EngineRankBody) -> tuple[Topology, Rank]:
    if body.tp_size % body.dp_size:
        raise RegistryError(400, f"tp_size {body.tp_size}: must be a multiple of dp_size {body.dp_size}", "tp_size")
    tp = body.tp_size // body.dp_size
    return Topology(dp=body.dp_size, tp=tp), Rank(dp=body.engine_rank // tp, tp=body.engine_rank % tp)


def _attention_place(body: _AttentionRankBody) -> tuple[Topology, Rank]:
    if body.system_dp_size > 1:
        dp, dp_rank = body.system_dp_size, body.system_dp_rank
    else:
        dp, dp_rank = body.attn_dp_size, body.attn_dp_rank
    return (
        Topology(dp, body.attn_cp_size, body.attn_tp_size, body.pp_size),
        Rank(dp_rank, body.attn_cp_rank, body.attn_tp_rank, body.pp_rank),
    )


def registration_body(registration: Registration) -> bytes:
    """Return the registration that our ranks send: the later generation's body, with our two fields."""
    topology, rank = registration.topology, registration.rank
    return msgspec.json.encode(
        _AttentionRankBody(
            rank_ip=registration.host,
            rank_port=registration.port,
            page_size=registration.page_size,
            kv_cache_dtype=registration.kv_cache_dtype,
            kv_layout=registration.kv_layout,
            instance=registration.instance,
            heartbeat_s=registration.heartbeat_s,
            attn_dp_size=topology.dp,
            attn_dp_rank=rank.dp,
            attn_cp_size=topology.cp,
            attn_cp_rank=rank.cp,
            attn_tp_size=topology.tp,
            attn_tp_rank=rank.tp,
            pp_size=topology.pp,
            pp_rank=rank.pp,
        )
    )


class RankAddress(msgspec.Struct, frozen=True):
    """The address of a rank. `instance` changes with each start."""

    rank: Rank
    address: str
    instance: str

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.address}"


class PrefillRanks(msgspec.Struct, frozen=True):
    """All ranks of a prefill instance: the answer to `GET /ranks`."""

    topology: Topology
    ranks: list[RankAddress]

    def rank(self, rank: Rank) -> RankAddress:
        return next(entry for entry in self.ranks if entry.rank == rank)


class RankRegistry:
    """The live ranks at an instant `now` of a monotonic clock."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, Registration] = {}
        self._expires: dict[Rank, float] = {}

    def register(self, registration: Registration, now: float) -> None:
        """Add a rank, a heartbeat, or a new instance. Raises RegistryError if live ranks have another topology."""
        self._expire(now)
        others = [r for r in self._ranks.values() if r.topology != registration.topology]
        if any(other.heartbeat_s is not None for other in others):
            raise RegistryError(
                409,
                f"this rank has {_sizes(registration.topology)}, live ranks have {_sizes(others[0].topology)}: "
                "start all ranks of a prefill with the same sizes, or wait until the old ranks expire",
            )
        for other in others:
            self._remove(other.rank)
        self._ranks[registration.rank] = registration
        beat = registration.heartbeat_s
        self._expires[registration.rank] = now + (HEARTBEATS_MISSED + 0.5) * beat if beat else float("inf")

    def deregister(self, rank: Rank, instance: str, now: float) -> None:
        """Remove a rank if its instance is the same. Raises RegistryError if it is not registered."""
        self._expire(now)
        entry = self._ranks.get(rank)
        if entry is None or entry.instance != instance:
            raise RegistryError(404, f"{_place(rank)} instance {instance!r} is not registered")
        self._remove(rank)

    def counts(self, now: float) -> tuple[int, int]:
        """Return the registered and the expected number of ranks; the latter is 0 before the first registration."""
        self._expire(now)
        first = next(iter(self._ranks.values()), None)
        return len(self._ranks), first.topology.ranks if first else 0

    def complete(self, now: float) -> Registration:
        """Return any rank, for the properties that all share. Raises RegistryError until every rank is registered."""
        registered, expected = self.counts(now)
        if not registered or registered < expected:
            of = f" of {expected}" if expected else ""
            raise RegistryError(503, f"not ready: {registered}{of} prefill ranks are registered; retry later")
        return next(iter(self._ranks.values()))

    def rank(self, rank: Rank, now: float) -> Registration:
        """Return a rank. Raises RegistryError: 503 until every rank is registered, 404 for one that does not exist."""
        topology = self.complete(now).topology
        if rank not in self._ranks:
            raise RegistryError(404, f"{_place(rank)} does not exist: the prefill has {_sizes(topology)}")
        return self._ranks[rank]

    def ranks(self, now: float) -> PrefillRanks:
        """Return all ranks. Raises RegistryError with 503 until every rank is registered."""
        topology = self.complete(now).topology
        entries = [
            RankAddress(rank, join_host_port(entry.host, entry.port), entry.instance)
            for rank, entry in sorted(self._ranks.items())
        ]
        return PrefillRanks(topology, entries)

    def _expire(self, now: float) -> None:
        for rank in [rank for rank, expires in self._expires.items() if expires <= now]:
            self._remove(rank)

    def _remove(self, rank: Rank) -> None:
        del self._ranks[rank], self._expires[rank]


def check_ranks(answer: PrefillRanks) -> None:
    """Check an answer. Raises ValueError unless every rank is in it once, with a valid address."""
    if sorted(entry.rank for entry in answer.ranks) != answer.topology.places():
        raise ValueError(f"it names other ranks than {_sizes(answer.topology)} has")
    for entry in answer.ranks:
        split_host_port(entry.address, "rank address")


def _sizes(topology: Topology) -> str:
    return f"DP {topology.dp}, CP {topology.cp}, TP {topology.tp}, PP {topology.pp}"


def _place(rank: Rank) -> str:
    return f"rank DP {rank.dp}, CP {rank.cp}, TP {rank.tp}, PP {rank.pp}"
