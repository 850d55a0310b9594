"""The source of a model's tokenizer, and its comparison with the engines that serve the model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from constants import changed
from played_engine import IMAGE_TOKEN, MODEL, SEES_IMAGES, PlayedEngine, with_template

from indexer import Target
from router.apis.endpoints import RESPONSES
from router.apis.requests import ChatPrompt, TextPrompts
from router.cache_state.target_audit import PredictionErrors, TargetAudit
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.worker import Worker
from router.settings import ModelSettings, TokenizerSettings
from router.tokens import model_files, tokenizer_source
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.tokenizer_source import TokenizerSource, configured_tokenizers
from router.tokens.tokenizers import OnTrialError, Tokenizers, TokenizerUnavailableError

TEXT = TextPrompts(["What holds the cache?"])
CHAT = ChatPrompt([{"role": "user", "content": "What holds the cache?"}])
SYSTEM = ChatPrompt([{"role": "system", "content": "Be brief."}, *CHAT.messages])


@dataclass
class Played:
    """A source, the tokenizers it fills, and two engines that read prompts as the model's files say."""

    source: TokenizerSource
    tokenizers: Tokenizers
    engines: list[PlayedEngine]
    workers: list[Worker]
    audits: list[tuple[Target, TargetAudit]]

    async def provide(self, number: int = 0, root: str | None = str(MODEL)) -> None:
        """A worker answers that it serves the model."""
        await self.source.provide(self.workers[number], ServedModel("m", "m", None, root))

    async def describes(self, number: int, engine: Engine) -> None:
        """A worker describes itself as this engine, which renders chats its way, and is tried."""
        sglang = engine is Engine.SGLANG
        self.engines[number].tokenizer = LocalTokenizer.load(str(MODEL), sglang=sglang)
        self.engines[number].renders = not sglang
        self.workers[number].describe(WorkerDescription(engine, {"m": ServedModel("m", "m")}))
        await self.answers(number)

    async def answers(self, number: int = 0, root: str | None = str(MODEL)) -> None:
        """A worker answers that it serves the model, and is tried if that is due."""
        await self.provide(number, root)
        await self.source.settled()

    def restart(self, number: int = 0) -> None:
        """A worker was away, and describes itself again."""
        self.workers[number].describe(WorkerDescription(Engine.VLLM, {"m": ServedModel("m", "m")}))

    @property
    def report(self) -> dict[str, Any]:
        return self.source.report()["m"]

    @property
    def route(self) -> str:
        return str(self.report["source"])

    @property
    def findings(self) -> list[str]:
        return [found["finding"] for found in self.source.findings()]


@asynccontextmanager
async def playing(local: LocalTokenizer, check_interval: float = 60, **models: ModelSettings) -> AsyncIterator[Played]:
    async with AsyncExitStack() as stack:
        tokenizers = Tokenizers()
        stack.push_async_callback(tokenizers.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engines = [await stack.enter_async_context(PlayedEngine(local).serving()) for _ in range(2)]
        stack.enter_context(changed(check_interval=check_interval))
        audits: list[tuple[Target, TargetAudit]] = []
        source = TokenizerSource(tokenizers, models, session, TokenizerSettings(), lambda: audits)
        stack.push_async_callback(source.close)
        yield Played(source, tokenizers, engines, [engine.worker for engine in engines], audits)


@pytest.fixture
async def played(local: LocalTokenizer) -> AsyncIterator[Played]:
    async with playing(local) as played:
        yield played


TEMPLATE: str = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
SHOUTING = TEMPLATE.replace("{{ '<|im_start|>' + (", "{{ 'HEAR: <|im_start|>' + (")
assert SHOUTING != TEMPLATE


def replaced(folder: Path, template: str) -> str:
    """Return the path of a copy of the model with another chat template."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return str(folder)


async def test_local_folder_named_by_a_worker_is_used(played: Played, local: LocalTokenizer) -> None:
    await played.answers()
    assert (await played.tokenizers.tokenize("m", CHAT)).token_ids == local.tokenize(CHAT)
    report = played.report
    assert (report["source"], report["reading"], report["compared_with"]) == ("local", "fastokens", "render")
    assert set(report["probes"].values()) <= {"local", "refused"}
    assert played.findings == []


async def test_engine_without_rendering_does_not_make_the_key_invalid(played: Played) -> None:
    """vLLM answers 403 to that, unless it was started with `--enable-scale-out`."""
    played.engines[0].renders = False
    await played.answers()
    assert played.report["compared_with"] == "tokenize"
    assert played.workers[0].key.problem is None


@pytest.mark.parametrize("root", [None, "/nowhere/m", "organisation/model"])
async def test_engines_tokenize_without_a_folder_and_the_setting_is_reported(
    played: Played, local: LocalTokenizer, root: str | None
) -> None:
    await played.answers(root=root)
    assert (await played.tokenizers.tokenize("m", CHAT)).token_ids == local.tokenize(CHAT)
    assert played.route == "engine"
    (found,) = played.source.findings()
    assert found["finding"] == "tokenizer_missing"
    assert "set models.m.tokenizer" in found["detail"]


async def test_tokenizer_of_an_unserved_model_is_dropped(local: LocalTokenizer) -> None:
    async with playing(local, kept=ModelSettings()) as played:
        for name in ("m", "kept"):
            served = ServedModel(name, name)
            for number in (0, 1):
                worker = played.workers[number]
                worker.describe(WorkerDescription(Engine.VLLM, {name: served}))
                await played.source.provide(worker, served)
            await played.source.settled()
        assert set(played.tokenizers.by_model()) == set(played.source.report()) == {"kept"}
        other = ServedModel("other", "other")
        for worker in played.workers:
            worker.describe(WorkerDescription(Engine.VLLM, {"other": other}))
            await played.source.provide(worker, other)
        assert set(played.tokenizers.by_model()) == {"kept", "other"}


async def test_settings_override_the_folder_of_a_worker(local: LocalTokenizer, tmp_path: Path) -> None:
    async with playing(local, m=ModelSettings(tokenizer=str(MODEL))) as played:
        await played.answers(root=str(tmp_path))
        assert played.route == "local"


async def test_folder_without_tokenizer_is_ignored(played: Played, tmp_path: Path) -> None:
    await played.answers(root=str(tmp_path))
    assert played.route == "engine"
    assert "no tokenizer.json there" in played.source.findings()[0]["detail"]


async def test_only_prompts_that_differ_are_tokenized_by_engines(played: Played, local: LocalTokenizer) -> None:
    # The engine was started with another template than the one in its folder.
    shouting = TEMPLATE.replace(
        "{{ '<|im_start|>' + (",
        "{%- if message['role'] == 'system' -%}{{ 'IMPORTANT ' }}{%- endif -%}{{ '<|im_start|>' + (",
    )
    for engine in played.engines:
        engine.tokenizer = with_template(shouting)
    await played.answers()
    assert played.route == "mixed"
    report = played.report
    assert report["probes"]["system"] == "engine"
    assert report["probes"]["plain"] == "local"
    assert "the router has" in report["differences"]["system"]
    assert played.findings == ["prompts_asked"]
    asked = played.engines[0].asked.total()
    assert (await played.tokenizers.tokenize("m", CHAT)).token_ids == local.tokenize(CHAT)
    assert played.engines[0].asked.total() == asked
    found = await played.tokenizers.tokenize("m", SYSTEM)
    assert found.token_ids == played.engines[0].tokenizer.tokenize(SYSTEM) != local.tokenize(SYSTEM)


async def test_difference_without_an_engine_tokenizer_is_reported(played: Played) -> None:
    for engine in played.engines:
        engine.renders = False
        engine.tokenizer = with_template(SHOUTING)
    await played.answers()
    assert played.findings == ["prompts_asked"]  # of /tokenize


async def test_restarted_worker_is_compared_again(played: Played) -> None:
    await played.answers()
    tried = played.engines[0].asked.total()
    await played.answers()
    assert played.engines[0].asked.total() == tried  # not before that is due
    played.engines[0].tokenizer = with_template(SHOUTING)
    played.restart()
    await played.answers()
    assert played.route == "engine"
    found = await played.tokenizers.tokenize("m", CHAT)
    assert found.token_ids == played.engines[0].tokenizer.tokenize(CHAT)


async def test_changed_template_is_detected_and_replaced(local: LocalTokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    async with playing(local, check_interval=1e-6) as played:
        await played.answers(root=replaced(folder, TEMPLATE))
        assert played.route == "local"
        played.engines[0].tokenizer = with_template(SHOUTING)
        await played.answers(root=str(folder))
        assert played.route == "engine"
        # Once the folder has the new template, engines are not called.
        replaced(folder, SHOUTING)
        await played.answers(root=str(folder))
        assert played.route == "local"
        asked = played.engines[0].asked.total()
        found = await played.tokenizers.tokenize("m", CHAT)
        assert found.token_ids == played.engines[0].tokenizer.tokenize(CHAT)
        assert played.engines[0].asked.total() == asked


async def test_different_workers_are_each_compared(played: Played) -> None:
    played.engines[1].tokenizer = with_template(SHOUTING)
    await played.answers(0)
    assert played.route == "local"
    await played.answers(1)
    assert played.route == "engine"
    played.source.removed(played.workers[1])
    assert played.route == "local"


ENDED = ChatPrompt([*CHAT.messages, {"role": "assistant", "content": "The second."}])


async def test_chats_to_sglang_are_rendered_as_sglang_does(played: Played, local: LocalTokenizer) -> None:
    await played.describes(0, Engine.SGLANG)
    report = played.report
    assert (report["source"], report["compared_with"], played.findings) == ("local", "tokenize", [])
    apis = {"responses", "responses_tools", "messages", "messages_tools"}
    assert {kind for kind, way in report["probes"].items() if way != "local"} == apis
    asked = played.engines[0].asked.total()
    found = (await played.tokenizers.tokenize("m", ENDED)).token_ids
    assert found == played.engines[0].tokenizer.tokenize(ENDED) != local.tokenize(ENDED)
    assert played.engines[0].asked.total() == asked


async def test_model_of_two_engines_is_rendered_as_vllm_does_until_only_sglang_serves_it(
    played: Played, local: LocalTokenizer
) -> None:
    await played.describes(0, Engine.SGLANG)
    await played.describes(1, Engine.VLLM)
    await played.answers(0)
    assert (played.route, played.findings) == ("mixed", ["prompts_asked"])
    assert (await played.tokenizers.tokenize("m", CHAT)).token_ids == local.tokenize(CHAT)
    await played.describes(1, Engine.SGLANG)
    await played.answers(0)
    assert (played.route, played.findings) == ("local", [])
    await played.describes(0, Engine.VLLM)
    await played.describes(1, Engine.VLLM)
    await played.answers(0)
    assert (played.route, played.findings) == ("local", [])
    assert (await played.tokenizers.tokenize("m", ENDED)).token_ids == local.tokenize(ENDED)


def audited(played: Played) -> TargetAudit:
    """Return the audit of the first worker's target."""
    audit = TargetAudit(*(PredictionErrors(1) for _ in range(6)))
    played.audits.append((Target(played.workers[0].url, 0, "m"), audit))
    return audit


async def test_wrong_lengths_switch_a_model_to_its_engine_and_back(local: LocalTokenizer) -> None:
    async with playing(local, check_interval=1e-6) as played:
        audit = audited(played)
        await played.answers()
        assert played.route == "local"
        audit.lengths_differ = True
        await played.answers()
        assert played.route == "engine"
        assert played.findings == ["tokenizer_suspected"]
        for number in range(40):
            await played.tokenizers.tokenize("m", ChatPrompt([{"role": "user", "content": f"prompt {number}"}]))
        assert played.route == "local"
        await played.answers()
        assert played.route == "local"  # the same suspicion was looked into


async def test_suspected_engine_without_rendering_computes_the_probes(local: LocalTokenizer) -> None:
    async with playing(local, check_interval=1e-6) as played:
        audit = audited(played)
        engine = played.engines[0]
        engine.renders = False
        await played.answers()
        assert played.report["compared_with"] == "tokenize"
        assert engine.asked["/v1/chat/completions"] == 0  # nothing is computed without need
        audit.lengths_differ = True
        await played.answers()
        assert played.report["compared_with"] == "computed"
        assert engine.asked["/v1/chat/completions"] > 10


IMAGE = {"type": "image_url", "image_url": {"url": "data:,red#40"}}


async def test_engines_process_images(tmp_path: Path) -> None:
    folder = replaced(tmp_path, SEES_IMAGES)
    chat = ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}])
    async with playing(LocalTokenizer.load(folder)) as played:
        for engine in played.engines:
            engine.image_token = IMAGE_TOKEN
        played.engines[0].renders = False
        await played.answers(root=folder)
        found = await played.tokenizers.tokenize("m", chat)
        assert found.token_ids != found.identities, "it tells no name"
        assert len(found.identities[0]) > 40
        played.engines[0].renders = True
        played.restart()
        await played.answers(root=folder)
        other = ChatPrompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,b#7"}}]}])
        found = await played.tokenizers.tokenize("m", other)
        assert [span.name for span in found.token_ids[0].media] == ["data:,b#7 None"]
        assert played.report["media"] == {"named": 1, "unnamed": 1, "unknown": 0}
        assert found.token_ids is found.identities


async def test_engines_without_probes_are_assumed_to_agree(played: Played) -> None:
    for engine in played.engines:
        engine.renders = engine.tokenizes = False
    await played.answers()
    assert played.route == "local"
    report = played.report
    assert (report["compared_with"], set(report["probes"].values())) == ("nothing", {"untried"})


async def test_engine_tokenizes_every_prompt_until_the_first_trial_ends(played: Played) -> None:
    engine = played.engines[0]
    engine.tokenizer = with_template(SHOUTING)
    for renders in (True, False):
        engine.renders = renders
        played.restart()
        await played.provide()
        await asyncio.sleep(0)  # the trial begins
        assert played.tokenizers.states() == {"m": "trial running"}
        chat = ChatPrompt([{"role": "user", "content": f"renders: {renders}"}])
        assert (await played.tokenizers.tokenize("m", chat)).token_ids == engine.tokenizer.tokenize(chat)
        await played.source.settled()
        assert played.tokenizers.states() == {"m": "engine"}


@pytest.mark.parametrize("call", [None, (RESPONSES, b"{}")], ids=["no way to ask", "only /tokenize for another API"])
async def test_prompt_has_no_tokens_during_the_trial_if_no_engine_returns_them(
    played: Played, local: LocalTokenizer, call: tuple[str, bytes] | None
) -> None:
    played.engines[0].renders = False
    played.engines[0].tokenizes = call is not None
    await played.provide()
    chat = ChatPrompt(CHAT.messages)
    chat.call = call
    with pytest.raises(OnTrialError, match="trial"):
        await played.tokenizers.tokenize("m", chat)
    await played.source.settled()
    assert (await played.tokenizers.tokenize("m", chat)).token_ids == local.tokenize(chat)


async def test_next_trial_of_the_same_process_keeps_the_result_meanwhile(local: LocalTokenizer) -> None:
    async with playing(local, check_interval=1e-6) as played:
        await played.answers()
        await played.provide()
        assert played.tokenizers.states() == {"m": "local"}
        assert played.tokenizers.tokenize_now("m", CHAT) is not None


async def test_engine_is_compared_when_it_is_back(played: Played) -> None:
    played.engines[0].refusals = {"/v1/chat/completions/render": 500}
    await played.answers()
    assert played.route == "local"
    assert played.report["probes"] == {}
    played.engines[0].refusals = {}
    played.restart()
    await played.answers()
    assert played.report["probes"]["plain"] == "local"


async def test_files_are_loaded_from_the_hub_by_the_name_of_a_worker(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def fetch_from_hub(name: str) -> Path:
        asked.append(name)
        if name != "organisation/model":
            raise TokenizerUnavailableError("not there")
        return MODEL

    monkeypatch.setattr(tokenizer_source, "fetch_from_hub", fetch_from_hub)
    await played.answers(root="organisation/model")
    assert played.route == "local"
    assert asked == ["organisation/model"]


async def test_start_does_not_wait_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import huggingface_hub

    release = threading.Event()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: release.wait(60))
    try:
        with pytest.raises(TokenizerUnavailableError, match=r"within 0\.05 s"):
            await model_files.fetch_from_hub("organisation/model", 0.05)
    finally:
        release.set()


@pytest.mark.parametrize(
    ("name", "expected"), [("a/b", True), ("Qwen/Qwen3-0.6B", True), ("a", False), ("/a/b", False), ("../b", False)]
)
def test_valid_names_on_the_hub(name: str, expected: bool) -> None:
    assert model_files.is_hub_name(name) is expected


async def test_missing_tokenizer_in_settings_fails_at_start_without_workers(
    local: LocalTokenizer, tmp_path: Path
) -> None:
    named = {"m": ModelSettings(tokenizer=str(MODEL)), "n": ModelSettings()}
    tokenizers = await configured_tokenizers(named, TokenizerSettings())
    try:
        assert await tokenizers.token_ids("m", TEXT) == local.tokenize(TEXT)
        with pytest.raises(TokenizerUnavailableError, match="no tokenizer for model 'n'"):
            await tokenizers.token_ids("n", TEXT)
    finally:
        await tokenizers.close()
    with pytest.raises(TokenizerUnavailableError, match=str(tmp_path)):
        await configured_tokenizers({"m": ModelSettings(tokenizer=str(tmp_path))}, TokenizerSettings())
