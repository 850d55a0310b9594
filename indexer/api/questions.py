"""Queries of the index API: from the JSON of a body to the JSON of its answer.

- `POST /match`: return the cached tokens of a prompt, by target.
- `POST /query`: return the cached tokens of a token sequence, by tenant and instance.
- `POST /query_by_hash`: return the cached tokens of a prefix that is given by hashes.

In a large fleet most targets hold nothing of a prompt. An answer lists them behind the others. Their part of the answer
changes only when a worker registers, leaves or is renamed, so it is encoded once and cached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from http_api.errors import RequestError, named_first
from http_api.routes import decode_body
from indexer.api.bodies import HashQueryBody, PackedQuery, QueryBody, one_of
from indexer.hashing import PackedPrompt
from indexer.index import HashQuery, Match, MatchQuery, UnknownModelError
from indexer.indexer import Indexer
from indexer.native import native_core
from indexer.targets import Target, WorkerNames
from kvevents import Tier
from kvevents.decoding import json_reader

# Constants, because Python looks up members of an enumeration, and their names, at each use.
_GPU, _CPU, _DISK, _ = Tier
_TIER_NAMES = [(tier, tier.name.lower()) for tier in Tier]
_NO_TOKENS = dict.fromkeys(Tier, 0)


class _EmptyAnswers:
    """Encoded answers for a model's targets, each as if it held nothing.

    - `answer`: the whole answer by instance, for a prompt that no target holds.
    - `targets`, `instances`: the entry of each target and each instance.
    - `ranks`: the DP ranks of each instance.
    """

    def __init__(self, tenant: str, targets: list[Target], names: WorkerNames) -> None:
        matches = [Match(target, 0, _NO_TOKENS) for target in targets]
        instances = _by_instance(matches, names)
        self.answer = msgspec.json.encode({tenant: instances})
        self.targets = {match.target: _encode(_entry(match, names)) for match in matches}
        self.instances = {name: _encode(instance) for name, instance in instances.items()}
        self.ranks = {name: list(instance["DP"]) for name, instance in instances.items()}


class Answers:
    """Encoder of an indexer's answers."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self._empty: dict[tuple[str, str], _EmptyAnswers] = {}  # by model and tenant
        self._version = (0, 0)  # the registrations and renames that `_empty` was made after

    def by_target(
        self, model: str, tenant: str, tokens: int, matches: list[Match], elsewhere: dict[Target, dict[str, int]]
    ) -> bytes:
        """Return the answer by target. `elsewhere`: further tokens of targets, by the field that shows them."""
        others = self._empty_answers(model, tenant).targets.copy()
        known = {match.target for match in matches}
        matches = matches + [Match(target, 0, _NO_TOKENS) for target in elsewhere if target not in known]
        for match in matches:
            others.pop(match.target, None)
        held = [_entry(match, self._indexer.names) | elsewhere.get(match.target, {}) for match in matches]
        return msgspec.json.encode({"model": model, "tokens": tokens, "matches": [*held, *others.values()]})

    def by_instance(self, model: str, tenant: str, matches: list[Match]) -> bytes:
        """Return the answer of RFC 1403, by instance. Its tiers are those of the rank with the most tokens."""
        empty = self._empty_answers(model, tenant)
        if not matches:
            return empty.answer
        others, instances = empty.instances.copy(), _by_instance(matches, self._indexer.names)
        for name, instance in instances.items():
            others.pop(name, None)
            for rank in empty.ranks.get(name, ()):
                instance["DP"].setdefault(rank, 0)
        return msgspec.json.encode({tenant: instances | others})

    def of_query(self, body: QueryBody | PackedQuery | HashQueryBody, model: str, matches: list[Match]) -> bytes:
        """Return the answer to a query: in Dynamo's form if it has Dynamo's `model_name`, otherwise in RFC 1403's."""
        tenant, instance = body.tenant_id, "" if body.instance_id is None else str(body.instance_id)
        if not instance and body.model_name is None:
            return self.by_instance(model, tenant, matches)
        names = self._indexer.names
        targets = list(self._indexer.targets(model, tenant))
        if instance:
            targets = [target for target in targets if instance in (target.worker, names.get(target.worker))]
        held = {match.target: match for match in matches}
        chosen = [match for match in matches if match.target in targets]
        chosen += [Match(target, 0, _NO_TOKENS) for target in targets if target not in held]
        instances = _by_instance(chosen, names)
        return msgspec.json.encode({tenant: instances} if body.model_name is None else _dynamo_answer(instances))

    def _empty_answers(self, model: str, tenant: str) -> _EmptyAnswers:
        version = self._indexer.registrations, self._indexer.names.changes  # both only grow
        if version != self._version:
            self._version = version
            self._empty.clear()
        empty = self._empty.get((model, tenant))
        if empty is None:
            targets = list(self._indexer.targets(model, tenant))
            empty = self._empty[model, tenant] = _EmptyAnswers(tenant, targets, self._indexer.names)
        return empty


def _entry(match: Match, names: WorkerNames) -> dict[str, Any]:
    return {
        "worker": names.get(match.target.worker),
        "dp_rank": match.target.dp_rank,
        "matched_tokens": match.matched_tokens,
        "tiers": {name: match.tiers[tier] for tier, name in _TIER_NAMES},
    }


def _loadable(indexer: Indexer, query: MatchQuery, own: Mapping[Target, int]) -> dict[Target, int]:
    """Return the tokens of a prompt that targets load from pools, beside their own."""
    found: dict[Target, int] = {}
    for holdings in indexer.pooled(query, max(own.values(), default=0)):
        for target in indexer.targets(query.model, query.tenant):
            tokens = holdings.loadable(own.get(target, 0))
            if tokens > found.get(target, 0) and indexer.loads_from(target, holdings):
                found[target] = tokens
    return found


def _by_instance(matches: list[Match], names: WorkerNames) -> dict[str, Any]:
    instances: dict[str, Any] = {}
    for match in matches:
        target, tokens, tiers = match.target, match.matched_tokens, match.tiers
        name = names.get(target.worker)
        instance = instances.get(name)
        if instance is None:
            gpu, cpu, disk = tiers[_GPU], tiers[_CPU], tiers[_DISK]
            instance = instances[name] = {"longest_matched": tokens, "GPU": gpu, "CPU": cpu, "DISK": disk, "DP": {}}
        instance["DP"][str(target.dp_rank)] = tokens
    return instances


def _dynamo_answer(instances: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in the form of Dynamo's indexer, whose tiers are cumulative: `gpu` ≤ `cpu` ≤ `disk`."""
    scores, tiers = {}, {}
    for name, found in instances.items():
        gpu, cpu = found["GPU"], found["GPU"] + found["CPU"]
        scores[name] = {rank: tokens for rank, tokens in found["DP"].items() if tokens}
        longest = found["longest_matched"]
        tiers[name] = {"longest_matched": longest, "gpu": gpu, "cpu": cpu, "disk": longest, "dp": found["DP"]}
    return {"scores": {name: ranks for name, ranks in scores.items() if ranks}, "instances": tiers}


def _encode(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


# Reads the body of `/match` and tokenizes its prompt, at once or later. Raises RequestError.
ReadMatch = Callable[[bytes], MatchQuery | Awaitable[MatchQuery]]
# Turns the body of a query into the JSON of its answer, at once or later. Raises RequestError.
Answer = Callable[[bytes], bytes | Awaitable[bytes]]
# Returns the tokens of a prompt that targets can pull from peers, beside their own.
FindPullable = Callable[[MatchQuery, Mapping[Target, int]], Mapping[Target, int]]
# Packs a JSON list of token ids in the native core. Returns None for any other JSON.
PackedNumbers = Callable[[bytes], bytes | None]

T = TypeVar("T")

_decode_packed: Final = json_reader(PackedQuery)


class Questions:
    """Answers to queries of the index API, for every server that receives them. `by_path` maps a path to its method."""

    def __init__(self, indexer: Indexer, read_match: ReadMatch, pullable: FindPullable | None = None) -> None:
        self._indexer = indexer
        self._answers = Answers(indexer)
        self._read_match = read_match
        self._pullable = pullable
        core = native_core()
        self._packed_numbers = None if core is None else core.packed_numbers
        self.by_path: dict[str, Answer] = {
            "/match": self.match,
            "/query": self.query,
            "/query_by_hash": self.query_by_hash,
        }

    def match(self, body: bytes) -> bytes | Awaitable[bytes]:
        """Return how many tokens of a prompt each target would serve from its cache, the most first."""
        query = self._read_match(body)
        return self._match(query) if isinstance(query, MatchQuery) else self._match_later(query)

    async def _match_later(self, query: Awaitable[MatchQuery]) -> bytes:
        return self._match(await query)

    def _match(self, query: MatchQuery) -> bytes:
        matches = _find(self._indexer.match, query, "token_ids", 2**32 - 1)
        elsewhere: dict[Target, dict[str, int]] = {}
        if self._indexer.pools or self._pullable is not None:
            own = {match.target: match.matched_tokens for match in matches}
            pullable = {} if self._pullable is None else self._pullable(query, own)
            for field, found in (("loadable", _loadable(self._indexer, query, own)), ("pullable", pullable)):
                for target, tokens in found.items():
                    elsewhere.setdefault(target, {})[field] = tokens
        return self._answers.by_target(query.model, query.tenant, len(query.token_ids), matches, elsewhere)

    def query(self, body: bytes) -> bytes:
        """Return how many tokens of a token sequence each instance holds, including its last block."""
        read, query = _read_query(body, self._packed_numbers)
        matches = _find(self._indexer.longest, query, "token_ids", 2**32 - 1)
        return self._answers.of_query(read, query.model, matches)

    def query_by_hash(self, body: bytes) -> bytes:
        """Return how many tokens each instance holds of a prefix that is given by its prefix hashes."""
        read = decode_body(body, HashQueryBody)
        hashes = one_of(read, "block_hashes", "seq_hashes", "block_hash")
        salt = read.additional_salt or read.cache_salt or None
        query = HashQuery(one_of(read, "model", "model_name"), hashes, read.block_size, read.tenant_id, salt)
        matches = _find(self._indexer.longest_by_hash, query, "block_hashes", 2**64 - 1)
        return self._answers.of_query(read, query.model, matches)


def _read_query(body: bytes, packed_numbers: PackedNumbers | None) -> tuple[QueryBody | PackedQuery, MatchQuery]:
    packed = None if packed_numbers is None else _read_packed_query(body, packed_numbers)
    if packed is not None:
        return packed
    query = decode_body(body, QueryBody)
    return query, _match_query(query, query.token_ids)


def _match_query(read: QueryBody | PackedQuery, tokens: list[int] | PackedPrompt) -> MatchQuery:
    model, adapter, salt = one_of(read, "model", "model_name"), read.lora_name or None, read.cache_salt or None
    return MatchQuery(model, tokens, adapter, salt, read.tenant_id, read.additional_salt or None)


def _read_packed_query(body: bytes, packed_numbers: PackedNumbers) -> tuple[PackedQuery, MatchQuery] | None:
    """Read the body of `/query` without making a Python object for each token id.

    The native core packs the bytes of the only list; msgspec decodes the rest. Returns None for other bodies.
    """
    start, end = body.find(b"["), body.rfind(b"]") + 1
    if not 0 <= start < end:  # in compiled code, a slice that ends before its start raises
        return None
    tokens = packed_numbers(body[start:end])
    if tokens is None:
        return None
    try:
        # The rest has one list at most, the empty one: token_ids is this list, or no list.
        rest = _decode_packed(b"%b[]%b" % (body[:start], body[end:]))
    except msgspec.DecodeError:
        return None
    return rest, _match_query(rest, PackedPrompt(tokens))


def _find(find: Callable[[T], list[Match]], query: T, numbers: str, highest: int) -> list[Match]:
    """Call a lookup, and turn its errors into RequestError. `numbers`: a field with numbers up to `highest`."""
    try:
        return find(query)
    except UnknownModelError as unknown:
        raise RequestError(str(unknown), status=404, type="not_found_error", param="model") from unknown
    except OverflowError as error:
        raise RequestError(f"{numbers}: every number must be from 0 to {highest}", param=numbers) from error
    except ValueError as wrong:  # in compiled code, each kind of error needs a variable name of its own
        raise RequestError(str(wrong), param=named_first(wrong)) from wrong
