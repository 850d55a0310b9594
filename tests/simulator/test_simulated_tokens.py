"""The bundled tokenizer and chat template, and the answers written with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.worker.settings import BUNDLED_MODEL
from simulator.worker.tokens import AnswerWriter, ChatTokenizer, TemplateError


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


@pytest.fixture(scope="module")
def writer(tokenizer) -> AnswerWriter:
    return AnswerWriter(tokenizer)


def test_bundled_model_is_small_and_has_special_tokens():
    assert sum(path.stat().st_size for path in BUNDLED_MODEL.glob("*.json")) < 400_000
    added = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["special"] for token in added} == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
    }


@pytest.mark.parametrize(
    "text", ["plain words", "  spaces\n\n\ttabs", "naïve — 你好 🙂", "x" * 500, "<|im_start|>user"]
)
def test_decoding_inverts_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_conversation_renders_as_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.render(messages) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not tokenizer.render(messages, add_generation_prompt=False).endswith("<|im_start|>assistant\n")
    assert tokenizer.render(messages, continue_final_message=True).endswith("<|im_start|>user\nBye")


def test_text_parts_render_in_order_and_on_lines_in_tool_messages(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\nonetwo<|im_end|>" in tokenizer.render([{"role": "user", "content": parts}])
    assert "tool\none\ntwo<|im_end|>" in tokenizer.render([{"role": "tool", "content": parts, "tool_call_id": "1"}])


def test_tools_and_tool_calls_reach_template_as_in_vllm(tokenizer):
    tools = [{"type": "function", "function": {"name": "clock", "unknown": 1}}]
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "clock", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        {"role": "assistant", "content": "Noon", "tool_calls": []},
    ]
    text = tokenizer.render(messages, tools)
    assert '{"type": "function", "function": {"name": "clock", "description": null, "parameters": null}}' in text
    assert '<tool_call>clock {"zone": "UTC"}</tool_call><tool_call>clock {}</tool_call><|im_end|>' in text
    assert "assistant\nNoon<|im_end|>" in text


def test_text_only_template_receives_parts_joined_by_line_breaks(tmp_path):
    config = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_MODEL / "tokenizer.json").read_bytes())
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTokenizer(str(tmp_path)).render([{"role": "user", "content": parts}]) == "user: one\ntwo"


def test_refusal_of_template_is_reported(tmp_path):
    config = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('system messages are not supported') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_MODEL / "tokenizer.json").read_bytes())
    with pytest.raises(TemplateError, match="system messages are not supported"):
        ChatTokenizer(str(tmp_path)).render([{"role": "user", "content": "x"}])


def test_equal_prompts_have_equal_answers(writer):
    prompt = list(range(100, 150))
    answer = writer.answer(prompt, max_tokens=1000)
    assert writer.answer(prompt, max_tokens=1000) == answer
    others = [
        writer.answer(prompt[:-1], max_tokens=1000),
        writer.answer(prompt, max_tokens=1000, adapter="poet"),
        writer.answer(prompt, max_tokens=1000, choice=1),
    ]
    assert all(other != answer for other in others)


def test_answer_ends_by_itself_unless_eos_is_ignored(writer, tokenizer):
    prompt = [300, 301]
    own = writer.answer(prompt, max_tokens=1000)
    assert own.finish_reason == "stop"
    assert own.tokens[-1] == tokenizer.eos_token
    assert writer.text(own.tokens[-1]) == ""
    cut = writer.answer(prompt, max_tokens=5)
    assert (len(cut.tokens), cut.finish_reason) == (5, "length")
    assert cut.tokens == own.tokens[:5]
    endless = writer.answer(prompt, max_tokens=1000, ignore_eos=True)
    assert (len(endless.tokens), endless.finish_reason) == (1000, "length")
    assert len(writer.answer(prompt, max_tokens=1000, min_tokens=400).tokens) == 401


def test_answer_has_no_special_tokens_and_is_encoded_back(writer, tokenizer):
    for seed in range(20):
        question = [{"role": "user", "content": f"question {seed}"}]
        prompt = tokenizer.encode(tokenizer.render(question))
        tokens = writer.answer(prompt, max_tokens=40, ignore_eos=True).tokens
        text = "".join(map(writer.text, tokens))
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
        following = [*question, {"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        assert tokenizer.encode(tokenizer.render(following))[: len(prompt) + 40] == prompt + tokens


def test_training_script_is_beside_tokenizer():
    template = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())["chat_template"]
    namespace: dict[str, object] = {"__name__": "train"}
    exec(Path(BUNDLED_MODEL / "train.py").read_text(), namespace)
    assert namespace["CHAT_TEMPLATE"] == template


def test_begun_answer_is_continued(writer, tokenizer):
    prompt = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    for adapter in (None, "poet"):
        whole = writer.answer(prompt, max_tokens=1000, adapter=adapter)
        cut = writer.answer(prompt, max_tokens=9, adapter=adapter)
        for begun in range(len(whole.tokens)):
            begun_prompt = prompt + whole.tokens[:begun]
            rest = writer.answer(begun_prompt, max_tokens=1000 - begun, adapter=adapter)
            assert (rest.tokens, rest.finish_reason) == (whole.tokens[begun:], whole.finish_reason)
            if begun < 9:
                rest = writer.answer(begun_prompt, max_tokens=9 - begun, adapter=adapter)
                assert (rest.tokens, rest.finish_reason) == (cut.tokens[begun:], "length")
