"""Models whose chats no template renders: what engines make of them, and which files call for which encoder."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from played_engine import MODEL
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.endpoints import RESPONSES, read_request
from router.apis.requests import ChatPrompt, TextPrompts, Truncation
from router.tokens import TokenizerUnavailableError
from router.tokens.candidates import candidates
from router.tokens.deepseek_v32 import DeepSeekV32
from router.tokens.harmony import Harmony
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles

USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "I."}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def called(*ids: str) -> dict[str, Any]:
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}} for each in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id_: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": "2"}


BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CALL = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
THINKS = {"chat_template_kwargs": {"thinking": True}}


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (ChatPrompt([USER]), "<｜User｜>Who?<｜Assistant｜></think>"),
        (ChatPrompt([USER], **THINKS), "<｜User｜>Who?<｜Assistant｜><think>"),
        (ChatPrompt([{"role": "system", "content": "S"}, USER]), "S<｜User｜>Who?<｜Assistant｜></think>"),
        (
            ChatPrompt([USER, ANSWER | {"reasoning": "hm"}, USER], **THINKS),
            f"<｜User｜>Who?<｜Assistant｜></think>I.{END}<｜User｜>Who?<｜Assistant｜><think>",
        ),
        (
            ChatPrompt([{"role": "developer", "content": "D"}]),
            "<｜User｜>\n\n# The user's message is: D<｜Assistant｜></think>",
        ),
    ],
)
def test_deepseek_v32_prompt_equals_the_models(chat: ChatPrompt, text: str) -> None:
    assert DeepSeekV32().encode(chat) == BEGIN + text


def test_deepseek_v32_renders_calls_and_tools() -> None:
    rendered = DeepSeekV32().encode(ChatPrompt([USER, called("1", "2"), result("1"), result("2")]))
    assert rendered.count('<｜DSML｜invoke name="f">') == 2
    assert rendered.endswith(
        f"{END}\n\n<function_results>\n<result>2</result>\n<result>2</result>\n</function_results>\n\n</think>"
    )
    rendered = DeepSeekV32().encode(ChatPrompt([USER, called("1")], tools=TOOLS))
    assert rendered.endswith(f"{CALL}{END}")
    assert '<functions>\n{"name": "f", "description": "d", "parameters": {"type": "object"}}\n</functions>' in rendered


@pytest.mark.parametrize(
    "messages", [[result("1")], [{"role": "developer"}], [{"role": "critic", "content": "x"}], [USER, ANSWER]]
)
def test_deepseek_v32_refuses_unsupported_messages(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="cannot represent this request"):
        DeepSeekV32().encode(ChatPrompt(messages, **THINKS))


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony()


def shown(harmony: Harmony, chat: ChatPrompt) -> str:
    return str(harmony._encoding.decode(list(PackedPrompt(harmony.encode(chat)))))


@pytest.mark.parametrize("unit", ["a", "aÉ", "a\u0301", "!\u0301", " ", "\n", "_", "漢"])
def test_harmony_refuses_long_words(harmony: Harmony, unit: str) -> None:
    """The library's time grows with the square of a word's length: a minute for a quarter of a megabyte."""
    long = ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "x " + unit * 250_000}]}])
    with pytest.raises(TokenizerUnavailableError):
        harmony.encode(long)
    text = (f"{unit * 20} and so on, 1234. " * 1000)[:20_000]
    assert harmony.encode(ChatPrompt([{"role": "user", "content": text}]))


def test_harmony_prompt_equals_the_models(harmony: Harmony) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    chat = ChatPrompt([system, USER, ANSWER | {"reasoning": "hm"}, USER], reasoning_effort="low")
    text = shown(harmony, chat)
    assert "\nReasoning: low\n" in text
    assert text.endswith(
        "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Who?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>I.<|end|><|start|>user<|message|>Who?<|end|><|start|>assistant"
    )


def test_harmony_renders_calls_in_the_trained_format(harmony: Harmony) -> None:
    chat = ChatPrompt([USER, called("1") | {"reasoning": "hm"}, result("1")], tools=TOOLS)
    text = shown(harmony, chat)
    assert "// d\ntype f = " in text
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1, "b": "x"}<|call|>'
        "<|start|>functions.f<|channel|>commentary to=assistant<|message|>2<|end|><|start|>assistant"
    )


def test_harmony_reads_the_deprecated_name_of_reasoning(harmony: Harmony) -> None:
    chats = [
        ChatPrompt([USER, called("1") | {name: "hm"}, result("1")], tools=TOOLS)
        for name in ("reasoning", "reasoning_content")
    ]
    assert harmony.encode(chats[0]) == harmony.encode(chats[1])


@pytest.mark.parametrize(
    "given", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}], ids=["field", "variable"]
)
def test_harmony_ignores_a_template_in_the_request(harmony: Harmony, given: dict[str, Any]) -> None:
    local = LocalTokenizer(ModelFiles.read(MODEL), chat_encoder=harmony)
    assert local.tokenize(ChatPrompt([USER], **given)) == local.tokenize(ChatPrompt([USER]))


def test_harmony_converts_each_item_of_responses_alone(harmony: Harmony) -> None:
    answer = {"role": "assistant", "content": "Wait."}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    for items, channels in (([answer, call], ["final", "commentary"]), ([call, answer], ["commentary", "final"])):
        body = json.dumps({"model": "m", "input": [USER, *items]}).encode()
        chat = read_request("POST", RESPONSES, [], body).prompt
        assert isinstance(chat, ChatPrompt)
        text = shown(harmony, chat)
        assert [part.split("<|message|>")[0].split(" ")[0] for part in text.split("<|channel|>")[1:]] == channels


@pytest.mark.parametrize(("path", "answers"), [("/v1/responses", 1), ("/v1/chat/completions", 0)])
def test_harmony_keeps_empty_answers_of_responses(harmony: Harmony, path: str, answers: int) -> None:
    chat = ChatPrompt([USER, {"role": "assistant", "content": ""}, USER])
    chat.call = (path, b"{}")
    assert shown(harmony, chat).count("<|start|>assistant<|channel|>final<|message|><|end|>") == answers


def test_harmony_refuses_unknown_effort_and_truncation(harmony: Harmony) -> None:
    with pytest.raises(RequestError, match="low, medium or high"):
        harmony.encode(ChatPrompt([USER], reasoning_effort="none"))
    local = LocalTokenizer(ModelFiles.read(MODEL), chat_encoder=harmony)
    assert local.tokenize(ChatPrompt([USER], truncation=Truncation(3))) == local.tokenize(ChatPrompt([USER]))


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder = tmp_path_factory.mktemp("mistral")
    shutil.copy(str(files("mistral_common") / "data" / "tekken_240911.json"), folder / "tekken.json")
    (load, *_) = candidates(folder)
    return load(2**20)


def test_mistral_prompt_equals_the_models(tekken: LocalTokenizer) -> None:
    assert tekken.method == "mistral-common"
    (bare,) = tekken.tokenize(TextPrompts(["Who?"], add_special_tokens=False))
    (text,) = tekken.tokenize(TextPrompts(["Who?"]))
    (chat,) = tekken.tokenize(ChatPrompt([USER]))
    assert list(text) == [1, *bare]
    assert list(chat) == [1, 3, *bare, 4]  # `<s>[INST]Who?[/INST]`
    assert tekken.tokenize(ChatPrompt([USER], truncation=Truncation(2)))[0] == PackedPrompt.of(list(chat)[-2:])


def test_mistral_shortens_long_ids_of_calls(tekken: LocalTokenizer) -> None:
    long, short = "call_of_a_tool_abcdefghi", "abcdefghi"
    chats = [ChatPrompt([USER, called(each), result(each)], tools=TOOLS) for each in (long, short)]
    assert tekken.tokenize(chats[0]) == tekken.tokenize(chats[1])


@pytest.mark.parametrize(
    "chat",
    [
        ChatPrompt([USER, ANSWER]),
        ChatPrompt([USER], add_generation_prompt=False, continue_final_message=True),
        ChatPrompt([USER], chat_template_kwargs={"a": 1}),
        ChatPrompt([{"role": "critic", "content": "x"}]),
    ],
)
def test_mistral_refuses_unsupported_messages(tekken: LocalTokenizer, chat: ChatPrompt) -> None:
    with pytest.raises(RequestError):
        tekken.tokenize(chat)


def kimi(folder: Path) -> Path:
    """A tiktoken.model of single bytes and one pair, and a chat template."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"he"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    config = {
        "added_tokens_decoder": {"258": {"content": "<|im_end|>"}},
        "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_kimi_token_ids_equal_the_models(tmp_path: Path) -> None:
    local = candidates(kimi(tmp_path))[0](2**20)
    assert local.method == "tiktoken"
    (ids,) = local.tokenize(ChatPrompt([{"role": "user", "content": "he 漢a"}]))
    assert list(ids) == [256, 32, *"漢".encode(), 97, 258]
    assert local.vocab_size == 257 + 256


@pytest.mark.parametrize(
    ("package", "extra"),
    [("openai_harmony", "harmony"), ("mistral_common", "mistral"), ("tiktoken", "kimi"), ("transformers",) * 2],
)
def test_error_names_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    match extra:
        case "harmony":
            shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
            (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
        case "mistral":
            (tmp_path / "tekken.json").write_text("{}")
        case "kimi":
            kimi(tmp_path)
        case _:
            (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerUnavailableError, match=rf"pip install 'kvrouter\[{extra}\]'"):
        candidates(tmp_path)[0](0)


def test_tokenizer_kind_follows_from_the_files(tmp_path: Path) -> None:
    def readings(**files_: str) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files_.items():
            (folder / name.replace("__", ".")).write_text(text)
        return [load.__name__ for load in candidates(folder)]

    plain = (MODEL / "tokenizer.json").read_text()
    deepseek = Tokenizer(models.BPE())
    deepseek.pre_tokenizer = pre_tokenizers.ByteLevel()
    deepseek.add_special_tokens([AddedToken("<｜User｜>", special=True)])
    template = json.dumps({"chat_template": "x"})
    assert readings(tokenizer__json=plain) == ["as_it_is"]
    assert readings(tokenizer__json=plain, tokenizer_config__json=template) == ["as_it_is", "by_transformers"]
    assert readings(tokenizer__json=plain, config__json='{"model_type": "gpt_oss"}') == ["harmony", "as_it_is"]
    assert readings(tokenizer__json=deepseek.to_str()) == ["deepseek_v32", "as_it_is"]
    assert readings(tokenizer__json=deepseek.to_str(), tokenizer_config__json=template)[0] == "as_it_is"
    assert readings(tekken__json="{}", tokenizer__json=plain) == ["mistral", "as_it_is"]
    with pytest.raises(TokenizerUnavailableError, match="no tokenizer can be loaded"):
        readings()


def test_files_of_a_model_are_listed(tmp_path: Path) -> None:
    def write(name: str, content: Any) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    write("tokenizer.json", "{}")
    assert ModelFiles.read(tmp_path) == ModelFiles("{}")
    write("chat_template.json", {"chat_template": "oldest"})
    assert ModelFiles.read(tmp_path).template_for(tools=True) == "oldest"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write("tokenizer_config.json", {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": None})
    write("special_tokens_map.json", {"bos_token": "<b>", "pad_token": "<p>"})
    write("config.json", {"model_type": "x", "text_config": {"vocab_size": 7}})
    found = ModelFiles.read(tmp_path)
    assert (found.template_for(tools=False), found.template_for(tools=True)) == ("d", "t")
    assert found.special_tokens == {"bos_token": "<s>", "pad_token": "<p>"}
    assert (found.vocab_size, found.model_type) == (7, "x")
    write("chat_template.jinja", "file")
    write("additional_chat_templates/tool_use.jinja", "more")
    found = ModelFiles.read(tmp_path)
    assert (found.template_for(tools=False), found.template_for(tools=True)) == ("file", "more")
    write("tokenizer_config.json", "[]")
    with pytest.raises(TokenizerUnavailableError, match="not a JSON object"):
        ModelFiles.read(tmp_path)
