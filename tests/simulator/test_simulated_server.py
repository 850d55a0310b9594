"""A whole simulated worker: a process, real clients over HTTP, real subscribers over ZeroMQ."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import openai
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch
from kvevents.frames import parse_live, parse_replay, replay_request
from kvevents.sources import ReportedFields, vllm_sources
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from worker import PublisherConfig

DEADLINE_S = 60.0
START_DEADLINE_S = 60.0
FAST = {"base_step_s": 0.001, "prefill_s_per_token": 0.0, "decode_s_per_sequence": 0.0}


class Server:
    """A running worker, and the ways its users talk to it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """GET, or POST of a JSON body or raw bytes; the status and the answer, as JSON where it is."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def metrics(self) -> dict[tuple[str, str], float]:
        """Values by (name, engine) and, where there is a reason, (name:reason, engine)."""
        values = {}
        for family in text_string_to_metric_families(self.call("/metrics")[1]):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason")
                values[sample.name + (f":{reason}" if reason else ""), sample.labels["engine"]] = sample.value
        return values


@contextmanager
def process(**settings: Any) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "simulator.worker", json.dumps({**FAST, **settings})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        giving_up = threading.Timer(START_DEADLINE_S, child.kill)
        giving_up.start()
        line = child.stdout.readline()
        giving_up.cancel()
        if not line:
            pytest.fail(f"the worker did not start: {child.stderr.read()}")
        try:
            yield Server(line.split()[-1]), child
        finally:
            child.terminate()
            try:
                child.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with process(dp_size=2, adapters=["poet"], max_model_len=4096) as (server, _):
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


fresh_number = iter(range(1_000_000))


def fresh(length: int) -> list[int]:
    """A prompt whose every block no other test uses."""
    number = next(fresh_number)
    return [300 + number % 5000, 300 + number // 5000, *(300 + (number + each) % 5000 for each in range(length - 2))]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_chat_is_answered(client):
    answer = client.chat.completions.create(model="simulated", messages=[user("hello")], max_tokens=5)
    [choice] = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_stream_equals_whole_answer(client):
    request = {"model": "simulated", "messages": [user("stream this")]}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    first, *middle, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in middle][-1] == "stop"
    assert {chunk.choices[0].finish_reason for chunk in middle[:-1]} == {None}
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert len(middle) == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {first.id}


def test_stream_has_usage_only_on_request_and_ends_with_done(server):
    status, text = server.call("/v1/chat/completions", {"messages": [user("x")], "max_tokens": 2, "stream": True})
    assert status == 200
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert len(chunks) == 3
    assert all("usage" not in json.loads(chunk.removeprefix("data: ")) for chunk in chunks)


@pytest.mark.parametrize("prompt", ["some text", ["some text", "more"], [300, 301, 302], [[300, 301], [302]]])
@pytest.mark.parametrize("n", [1, 2])
def test_every_form_of_prompt_is_completed(client, prompt, n):
    answer = client.completions.create(model="simulated", prompt=prompt, n=n)
    prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in answer.choices] == list(range(prompts * n))
    assert len({choice.text for choice in answer.choices}) == prompts * n
    assert answer.usage.completion_tokens == sum(1 for choice in answer.choices for _ in choice.text.split())
    streamed = [""] * prompts * n
    for chunk in client.completions.create(model="simulated", prompt=prompt, n=n, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]


def test_answers_are_limited_by_context_and_max_completion_tokens(client):
    answer = client.completions.create(
        model="simulated", prompt=fresh(4090), max_tokens=100, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "length")
    answer = client.chat.completions.create(model="simulated", messages=[user("x")], max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_text_parts_and_tools_are_in_prompt(client, server):
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": " time?"}]}]
    answer = client.chat.completions.create(model="simulated", messages=messages, tools=tools, max_tokens=1)
    _, tokenized = server.call("/tokenize", {"messages": [user("what time?")], "tools": tools})
    assert answer.usage.prompt_tokens == tokenized["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"model": "other", "prompt": "x"}, 404, "model"),
        ("chat/completions", {"model": "other", "messages": [user("x")]}, 404, "model"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": ["x", ""]}, 400, "prompt"),
        ("completions", {"prompt": {"x": 1}}, 400, "prompt"),
        ("completions", {"prompt": [1, -1]}, 400, "prompt"),
        ("completions", {"prompt": [6144]}, 400, "prompt"),
        ("completions", {"prompt": [5] * 4096}, 400, "input_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 5000}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "min_tokens": 17}, 400, "min_tokens"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n"),
        ("completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ("completions", b"{", 400, "body"),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "x"}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0"),
        ("chat/completions", {"messages": [user("x " * 5000)]}, 400, "input_tokens"),
    ],
)
def test_invalid_request_is_rejected_with_field(server, path, body, status, param):
    got, answer = server.call(f"/v1/{path}", body)
    assert got == status
    assert answer["error"]["code"] == status
    assert answer["error"]["param"].startswith(param)
    assert param.split(".")[0] in answer["error"]["message"] or param in ("model", "input_tokens", "body")


def test_tokenize_and_detokenize_are_inverse(server):
    _, tokenized = server.call("/tokenize", {"prompt": "hello there", "return_token_strs": True})
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 4096
    assert server.call("/detokenize", {"tokens": tokenized["tokens"]}) == (200, {"prompt": "hello there"})
    assert server.call("/detokenize", {"tokens": [6144]})[0] == 400
    assert server.call("/tokenize", {"text": "x"})[0] == 400


def test_conversation_is_tokenized_as_answered(server, client):
    messages = [user("hello"), {"role": "assistant", "content": "hi"}, user("bye")]
    _, tokenized = server.call("/tokenize", {"messages": messages})
    _, text = server.call("/detokenize", {"tokens": tokenized["tokens"]})
    assert text["prompt"].endswith("<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n")
    answer = client.chat.completions.create(model="simulated", messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == tokenized["count"]
    _, without = server.call("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert tokenized["tokens"][: without["count"]] == without["tokens"]


def test_models_health_and_version_are_served(server, client):
    base, adapter = client.models.list().data
    assert (base.id, base.max_model_len, base.parent) == ("simulated", 4096, None)
    assert base.root.endswith("model")
    assert (adapter.id, adapter.parent) == ("poet", "simulated")
    assert server.call("/health") == (200, "")
    assert server.call("/version")[1]["version"]
    assert server.call("/nothing")[0] == 404


# The cache, as users see it


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_cached_tokens_are_longest_prefix_of_full_blocks(client):
    """The model: every earlier prompt and answer, token by token, and no block size but 16."""
    seen: list[list[int]] = []
    base = fresh(200)
    lengths = [70, 70, 64, 65, 16, 17, 15, 200, 199, 193, 192, 130]
    for length in lengths:
        prompt = [*base[:length]]
        answer = client.completions.create(
            model="simulated", prompt=prompt, max_tokens=1, extra_headers={"X-data-parallel-rank": "0"}
        )
        shared = max((common_prefix(prompt, each) for each in seen), default=0)
        assert cached(answer) == min(shared, length - 1) // 16 * 16
        seen.append(prompt[: len(prompt) // 16 * 16])  # the only token of the answer has no KV


def common_prefix(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )


def test_next_turn_finds_previous_turn_and_answer_cached(client):
    messages = [user(f"Tell me about number {next(fresh_number)}, " + "please " * 30)]
    first = client.chat.completions.create(
        model="simulated", messages=messages, max_tokens=64, extra_body={"ignore_eos": True}
    )
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, user("and then?")]
    second = client.chat.completions.create(model="simulated", messages=messages, max_tokens=1)
    assert cached(second) == (first.usage.prompt_tokens + 64 - 1) // 16 * 16


def test_adapters_and_salts_have_separate_caches(client):
    prompt = fresh(100)

    def ask(**fields: Any) -> int:
        return cached(client.completions.create(**{"model": "simulated", "prompt": prompt, "max_tokens": 1, **fields}))

    assert ask() == 0
    assert ask() == 96
    assert ask(model="poet") == 0
    assert ask(model="poet") == 96
    assert ask(extra_body={"cache_salt": "pepper"}) == 0
    assert ask(extra_body={"cache_salt": "pepper"}) == 96
    assert ask(extra_body={"cache_salt": "chili"}) == 0


def test_ranks_have_separate_caches_and_header_selects_rank(client, server):
    prompt = fresh(100)

    def ask(rank: str) -> int:
        headers = {"X-data-parallel-rank": rank}
        return cached(client.completions.create(model="simulated", prompt=prompt, max_tokens=1, extra_headers=headers))

    assert [ask("0"), ask("1"), ask("0"), ask("1")] == [0, 0, 96, 96]
    for bad in ("2", "-1", "x", "", "9" * 5000, "\xb2"):
        status, answer = server.call("/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": bad})
        assert (status, answer["error"]["param"]) == (400, "X-data-parallel-rank")


def test_metrics_are_counted_by_rank(client, server):
    before = server.metrics()
    prompt = fresh(100)
    for _ in range(2):
        client.completions.create(
            model="simulated", prompt=prompt, max_tokens=4, extra_headers={"X-data-parallel-rank": "1"}
        )
    after = server.metrics()

    def grown(name: str) -> list[float]:
        return [after[name, rank] - before[name, rank] for rank in ("0", "1")]

    assert grown("vllm:prefix_cache_queries_total") == [0, 200]
    assert grown("vllm:prefix_cache_hits_total") == [0, 96]
    assert grown("vllm:prompt_tokens_total") == [0, 200]
    assert grown("vllm:generation_tokens_total") == [0, 8]
    assert grown("vllm:request_success_total:length") == [0, 2]
    assert grown("vllm:time_to_first_token_seconds_count") == [0, 2]
    assert after["vllm:num_requests_running", "1"] == after["vllm:num_requests_waiting", "1"] == 0
    assert after["vllm:kv_cache_usage_perc", "1"] == 0
    text = server.call("/metrics")[1]
    assert 'vllm:cache_config_info{block_size="16"' in text
    assert 'num_gpu_blocks="4096"' in text
    assert 'model_name="simulated"' in text


# The event streams


class Streams:
    """Subscribe to every rank of a worker: earlier batches by replay, then live ones."""

    def __init__(self, server: Server) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        fields = ReportedFields()
        body = msgspec.json.encode(server.call("/kv_event_sources")[1])
        self.sources = vllm_sources(body, "127.0.0.1", fields, most_ranks=64).sources
        self.live = [self.open(zmq.SUB, source.endpoint) for source in self.sources]
        self.batches: list[dict[int, EventBatch]] = [{} for _ in self.sources]

    def open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        sock = self.context.socket(kind)
        sock.rcvtimeo = int(DEADLINE_S * 1000)
        if kind == zmq.SUB:
            sock.subscribe(b"")
        sock.connect(endpoint)
        return sock

    def replay(self, rank: int) -> None:
        """Everything the rank has published, which the live socket may have missed."""
        with self.open(zmq.DEALER, self.sources[rank].replay_endpoint) as dealer:
            dealer.send_multipart(replay_request(0))
            while (frame := parse_replay(dealer.recv_multipart())) is not None:
                self.batches[rank][frame.seq] = decode_batch(frame.payload)

    def receive(self, rank: int) -> EventBatch:
        frame = parse_live(self.live[rank].recv_multipart())
        batch = decode_batch(frame.payload)
        self.batches[rank][frame.seq] = batch
        return batch

    def held(self, rank: int) -> dict[Any, int]:
        """Return the copies of each block by hash after all batches, which must be complete."""
        assert list(self.batches[rank]) == list(range(len(self.batches[rank])))
        copies: dict[Any, int] = {}
        for batch in self.batches[rank].values():
            assert batch.rejected == []
            assert batch.dp_rank == rank
            for event in batch.events:
                match event:
                    case BlockStored():
                        for each in event.block_hashes:
                            copies[each] = copies.get(each, 0) + 1
                    case BlockRemoved():
                        for each in event.block_hashes:
                            copies[each] -= 1
                            assert copies[each] >= 0
                    case AllBlocksCleared():
                        copies = {}
        return {each: count for each, count in copies.items() if count}

    def close(self) -> None:
        for sock in self.live:
            sock.close(linger=0)
        self.context.term()


@pytest.fixture
def streams(server) -> Iterator[Streams]:
    streams = Streams(server)
    yield streams
    streams.close()


def test_each_rank_publishes_on_its_own_stream(client, streams):
    prompt = fresh(100)
    for rank in ("0", "1"):
        client.completions.create(
            model="poet",
            prompt=prompt,
            max_tokens=20,
            extra_headers={"X-data-parallel-rank": rank},
            extra_body={"cache_salt": "s"},
        )
    for rank in (0, 1):
        eventually(
            lambda rank=rank: streams.replay(rank) or stored_by(streams, rank, prompt), "the prompt is published"
        )
        events = stored_by(streams, rank, prompt)
        assert events[0].lora_name == "poet"
        assert events[0].extra_keys == [["poet", "s"], *[["poet"]] * 5]
        assert events[0].token_ids == prompt[:96]
        streams.held(rank)


def stored_by(streams: Streams, rank: int, prompt: list[int]) -> list[BlockStored]:
    events = [event for batch in streams.batches[rank].values() for event in batch.events]
    return [event for event in events if isinstance(event, BlockStored) and event.token_ids[:16] == prompt[:16]]


def test_subscriber_receives_events_before_answer(client, streams):
    headers = {"X-data-parallel-rank": "0"}
    while not streams.live[0].poll(50):  # until the subscription has reached the publisher
        client.completions.create(model="simulated", prompt=fresh(40), max_tokens=1, extra_headers=headers)
    prompt = fresh(40)
    client.completions.create(model="simulated", prompt=prompt, max_tokens=1, extra_headers=headers)
    while prompt[:32] not in [event.token_ids for event in streams.receive(0).events if isinstance(event, BlockStored)]:
        pass


def test_reset_clears_cache_and_reports_it(client, server, streams):
    prompt = fresh(50)
    headers = {"X-data-parallel-rank": "0"}
    client.completions.create(model="simulated", prompt=prompt, max_tokens=1, extra_headers=headers)
    assert server.call("/reset_prefix_cache", b"") == (200, {"success": True})
    for rank in (0, 1):
        eventually(
            lambda rank=rank: (
                streams.replay(rank) or list(streams.batches[rank].values())[-1].events[-1:] == [AllBlocksCleared()]
            ),
            "the reset is published",
        )
        assert streams.held(rank) == {}
    again = client.completions.create(model="simulated", prompt=prompt, max_tokens=1, extra_headers=headers)
    assert cached(again) == 0


def test_events_follow_evictions_under_pressure():
    with (
        process(num_blocks=32, max_model_len=256, block_size=8) as (server, _),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S) as client,
    ):
        prompts = [fresh(100) for _ in range(6)]
        for prompt in prompts:
            client.completions.create(model="simulated", prompt=prompt, max_tokens=1)
        streams = Streams(server)
        streams.replay(0)
        held = streams.held(0)
        streams.close()
        assert len(held) == 32 - 1  # all but the last prompt's unfinished block
        assert cached(client.completions.create(model="simulated", prompt=prompts[-1], max_tokens=1)) == 96
        assert cached(client.completions.create(model="simulated", prompt=prompts[0], max_tokens=1)) == 0


# Load


def test_requests_queue_are_refused_and_are_aborted():
    async def scenario() -> None:
        settings = SimulatedWorkerSettings(max_num_seqs=2, max_waiting=2, base_step_s=0.005)
        async with (
            running(settings) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
        ):
            server = Server(url)

            async def load() -> tuple[float, float]:
                metrics = await asyncio.to_thread(server.metrics)
                return metrics["vllm:num_requests_running", "0"], metrics["vllm:num_requests_waiting", "0"]

            async def until(expected: tuple[float, float]) -> None:
                deadline = time.monotonic() + DEADLINE_S
                while (now := await load()) != expected:
                    assert time.monotonic() < deadline, f"running and waiting are {now}, not {expected}"

            async def ask(stream: bool) -> Any:
                return await client.completions.create(
                    model="simulated", prompt="x", max_tokens=5000, stream=stream, extra_body={"ignore_eos": True}
                )

            streaming = [await ask(stream=True) for _ in range(2)]
            await until((2, 0))
            assert (await asyncio.to_thread(server.metrics))["vllm:kv_cache_usage_perc", "0"] > 0
            waiting = [asyncio.create_task(ask(stream=False)) for _ in range(2)]
            await until((2, 2))
            with pytest.raises(openai.InternalServerError) as refused:
                await ask(stream=False)
            assert refused.value.status_code == 503
            status, answer = await asyncio.to_thread(server.call, "/reset_prefix_cache", b"")
            assert (status, answer) == (200, {"success": False})

            await streaming[0].close()  # the first waiting request uses the freed slot
            await until((2, 1))
            waiting[1].cancel()
            await until((2, 0))
            await streaming[1].close()
            await until((1, 0))
            waiting[0].cancel()
            await until((0, 0))
            metrics = await asyncio.to_thread(server.metrics)
            assert metrics["vllm:request_success_total:abort", "0"] == 4
            assert metrics["vllm:kv_cache_usage_perc", "0"] == 0
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


# The process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_process_cleanly_with_open_requests(number):
    with process(base_step_s=0.02) as (server, child):
        body = json.dumps({"prompt": "x", "max_tokens": 10_000, "ignore_eos": True, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            assert response.readline().startswith(b"data: ")
            child.send_signal(number)
            assert child.wait(DEADLINE_S) == 0


def test_worker_without_events_has_no_sources():
    async def scenario() -> None:
        async with running(SimulatedWorkerSettings(kv_events=None)) as url:
            server = Server(url)
            assert await asyncio.to_thread(server.call, "/kv_event_sources") == (200, {})
            assert (await asyncio.to_thread(server.call, "/v1/completions", {"prompt": "x"}))[0] == 200

    asyncio.run(scenario())


def test_port_in_use_is_error_without_leftovers():
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match="in use"):
                async with running(SimulatedWorkerSettings(port=port)):
                    pass
            endpoint = f"tcp://127.0.0.1:{port}"
            with pytest.raises(OSError, match=endpoint):
                async with running(
                    SimulatedWorkerSettings(kv_events=PublisherConfig(publisher="zmq", endpoint=endpoint))
                ):
                    pass

    before = threading.active_count()
    asyncio.run(scenario())
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 10}, "raise num_blocks or lower max_model_len"),
        ({"adapters": ("simulated",)}, "adapters"),
        ({"port": 70000}, "port"),
        ({"base_step_s": -1}, "base_step_s"),
        ({"kv_events": PublisherConfig(publisher="kafka")}, "kv_events.publisher"),
    ],
)
def test_invalid_worker_settings_are_rejected_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        SimulatedWorkerSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"), [({"dp_size": "two"}, "dp_size"), ({"blocksize": 16}, "unknown: blocksize")]
)
def test_command_rejects_unreadable_settings(settings, message):
    command = [sys.executable, "-m", "simulator.worker", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
