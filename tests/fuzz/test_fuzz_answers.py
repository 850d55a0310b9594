"""Answers of workers, engines, masters and peers, damaged: each reader raises its own error, and no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from budget import damaged, examples

from indexer.dump import DumpError, read_dump
from indexer.pools.mooncake import MasterContent, MooncakeMaster, stored_keys
from indexer.pools.pool import PoolConfig, SharedPool
from kvevents.decoding import msgpack_reader, read_json
from kvevents.sources import ReportedFields, sglang_sources, vllm_sources
from router.apis.abilities import sglang_lacks
from router.apis.requests import TextPrompts
from router.apis.response_owners import ResponseOwners
from router.apis.stream_errors import stream_error
from router.apis.usage import UsageTail
from router.fleet.engine_metrics import read_engine_loads, read_sleep
from router.fleet.hicache import hicache_layout
from router.load.load_messages import decode
from router.tokens.engine_client import EngineClient, TokenizerUnavailableError

FEW = 300
_DEEP = b"[" * 5000 + b"]" * 5000
# Values that some reader of JSON refuses, each with another error.
_VALUES = [
    *(b"\xff", b'"\xff"', b'"\\ud800"', b'"\xed\xa0\x80"', _DEEP, b'{"a":' * 5000, b"1e999", b"-1e400", b"9" * 5000),
    *(
        b"NaN",
        b"-Infinity",
        b"null",
        b"true",
        b"-1",
        b"1.5",
        b'""',
        b"[]",
        b"{}",
        b'{"a":1,"a":2}',
        b"18446744073709551616",
    ),
]


class _Engine(EngineClient):
    """A client of an engine that answers with these bytes."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(None, "m")  # type: ignore[arg-type]
        self._answer = answer

    async def _post(self, worker: str, path: str, body: dict[str, Any]) -> bytes:  # noqa: ARG002
        return self._answer


def _asked(method: str) -> Callable[[bytes], Any]:
    prompt = TextPrompts(["a"])
    return lambda data: asyncio.run(getattr(_Engine(data), method)("http://w", prompt))


def _pool() -> SharedPool:
    return SharedPool(PoolConfig("p"))


def _polled(data: bytes) -> None:
    answers = {"/metrics": data, "/get_all_keys": data}
    content = MasterContent(_pool(), MooncakeMaster("http://m", "tcp://m:1"), answers.__getitem__)
    content.check(0.0)
    content.check(100.0)


def _streamed(data: bytes) -> None:
    MasterContent(_pool(), MooncakeMaster("http://m", "tcp://m:1"), lambda _: b"").receive(1, data)


def _usage(data: bytes) -> None:
    reader = UsageTail()
    reader.feed(data)
    reader.usage()


_HEADER = b'{"format":1,"secret":"","created":1}\n'
_METRICS = b'master_key_count 7\nmaster_evicted_key_count 3\nvllm:num_requests_running{engine="0"} 2\n'
_RENDERED = {
    "token_ids": [1, 2],
    "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}},
}
_EVENTS = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 16, "dp_size": 1}
READERS: dict[str, tuple[Callable[[bytes], Any], bytes, tuple[type[Exception], ...]]] = {
    "rendered prompts": (_asked("rendered"), json.dumps(_RENDERED).encode(), (TokenizerUnavailableError,)),
    "tokenized prompts": (_asked("tokenized"), b'{"tokens": [1, 2], "count": 2}', (TokenizerUnavailableError,)),
    "computed prompts": (
        _asked("computed"),
        b'{"prompt_token_ids": [1, 2], "choices": [{"prompt_token_ids": [1]}]}',
        (TokenizerUnavailableError,),
    ),
    "streams of vLLM": (
        lambda data: vllm_sources(data, "w", ReportedFields(), 8),
        b'{"0": {"endpoint": "tcp://*:5557", "topic": "kv"}}',
        (msgspec.DecodeError,),
    ),
    "streams of SGLang": (
        lambda data: sglang_sources(data, "w", ReportedFields(), 8),
        json.dumps({"page_size": 16, "kv_events": _EVENTS}).encode(),
        (msgspec.DecodeError,),
    ),
    "abilities of SGLang": (
        lambda data: sglang_lacks(data, data),
        b'{"disable_radix_cache": false, "is_generation": true}',
        (msgspec.DecodeError,),
    ),
    "layout of HiCache": (
        lambda data: hicache_layout(data, ReportedFields()),
        b'{"hicache_storage_backend": "mooncake", "hicache_storage_backend_extra_config": "{}", "tp_size": 1}',
        (msgspec.DecodeError,),
    ),
    "metrics": (lambda data: read_engine_loads(data.decode(errors="replace")), _METRICS, ()),
    "sleep": (lambda data: read_sleep(data.decode(errors="replace")), _METRICS, ()),
    "usage": (_usage, b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n', ()),
    "errors of streams": (stream_error, b'data: {"error": {"message": "x", "code": 503}}\n\n', ()),
    "ids of responses": (lambda data: ResponseOwners().learn(data, "w"), b'{"id": "resp_1", "object": "response"}', ()),
    "counters of a master": (_polled, _METRICS, ()),
    "stream of a master": (_streamed, msgspec.msgpack.encode([1.0, [{"event_type": "stored", "object_key": "a"}]]), ()),
    "keys of a master": (stored_keys, b'{"data": {"a": {"ok": true}}}', (msgspec.DecodeError,)),
    "load of peers": (decode, msgspec.msgpack.encode([1, "a"]), (ValueError,)),
    "dumps": (lambda data: read_dump([_HEADER, data], ""), b'{"type": "end"}', (DumpError,)),
    "JSON": (read_json, b'{"a": [1, "b", null]}', (msgspec.DecodeError,)),
    "msgpack": (msgpack_reader(Any), msgspec.msgpack.encode({"a": [1, "b", None]}), (msgspec.DecodeError,)),
}


def _hostile(random: Random, sample: bytes) -> bytes:
    """Return the sample with a hostile value in place of one of its own, cut off, or damaged."""
    match random.randrange(4):
        case 0:
            return random.choice(_VALUES)
        case 1:
            values = [place for place, byte in enumerate(sample) if byte in b":[ ,"] or [0]
            place = random.choice(values) + 1
            rest = sample[place:].lstrip()
            ends = min((rest.find(byte) for byte in (b",", b"}", b"]", b"\n") if byte in rest), default=len(rest))
            return sample[:place] + random.choice(_VALUES) + rest[ends:]
        case 2:
            return sample[: random.randrange(len(sample) + 1)]
        case _:
            return damaged(random, sample)


@pytest.mark.parametrize("name", READERS)
def test_reader_raises_only_its_own_error(name: str) -> None:
    read, sample, errors = READERS[name]
    for random in examples(FEW, share=1 / len(READERS)):
        data = _hostile(random, sample)
        try:
            read(data)
        except errors:
            pass
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} for {data[:200]!r}")
