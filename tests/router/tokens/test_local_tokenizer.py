"""A model's own tokenizer: loaded from its folder, giving transformers' ids, from any number of threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played_engine import MODEL
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt
from router.tokens import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles, files_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.usefixtures("short_trials")

USER = {"role": "user", "content": "What holds the cache?"}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def trained(bos: bool = False) -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, which puts <s> before a text if asked to."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the worker holds the cache of the prefix"], trainer)
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def fast(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers, whose import takes a second."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def saved(folder: Path, tokenizer: Tokenizer, **config: object) -> str:
    fast(tokenizer, bos_token="<s>", eos_token="<|end|>").save_pretrained(folder)
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return str(folder)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.text() | st.text("<|>_imstartend \n"), min_size=1, max_size=3))
def test_token_ids_equal_those_of_transformers(
    local: LocalTokenizer, reference: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    assert [list(ids) for ids in local.encode(texts, add_special_tokens=True)] == reference(texts)["input_ids"]


def test_special_tokens_are_added_only_on_request(tmp_path: Path) -> None:
    tokenizer = LocalTokenizer.load(saved(tmp_path, trained(bos=True)))
    (with_bos,) = tokenizer.encode(["the cache"], add_special_tokens=True)
    (without,) = tokenizer.encode(["the cache"], add_special_tokens=False)
    assert list(with_bos) == [0, *without]
    assert tokenizer.encode([""], add_special_tokens=True) == [PackedPrompt.of([0])]
    assert tokenizer.encode([""], add_special_tokens=False) == [PackedPrompt.of([])]


@pytest.mark.parametrize("bos", [False, True])
def test_segments_are_cached_only_if_texts_cannot_be_cut(bos: bool) -> None:
    template = "{% for message in messages %}<s>{{ message.content }}<|end|>{% endfor %}"
    tokenizer = LocalTokenizer(ModelFiles(trained(bos).to_str(), {"default": template}))
    text = "<s>the worker holds the prefix<|end|>" * 2
    assert tokenizer.encode([text], add_special_tokens=True) == tokenizer.encode([text], add_special_tokens=True)
    assert (tokenizer.cached_bytes > 0) == bos


def test_one_tokenizer_is_used_by_many_threads(local: LocalTokenizer) -> None:
    texts = [f"worker {number} holds the prefix " * 50 for number in range(64)]
    expected = [local.encode([text], add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: local.encode([text], add_special_tokens=False), texts)) == expected


def test_chat_is_rendered_by_the_template_of_the_model(local: LocalTokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert local.render(ChatPrompt([USER])) == (
        "<|im_start|>user\nWhat holds the cache?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert '"name": "f", "description": null' in local.render(ChatPrompt([USER], tools=tools))


def test_template_for_tools_is_used_if_model_has_one() -> None:
    tokenizer = fast(trained())
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    local = LocalTokenizer(files_of(tokenizer))
    assert local.render(ChatPrompt([USER])) == "plain"
    assert local.render(ChatPrompt([USER], tools=[])) == "tools"


@pytest.mark.parametrize("template", [None, "{% for %}"])
def test_model_without_readable_template_cannot_render_chats(template: str | None) -> None:
    tokenizer = fast(trained())
    tokenizer.chat_template = template
    with pytest.raises(TokenizerUnavailableError, match="no valid chat template"):
        LocalTokenizer(files_of(tokenizer)).render(ChatPrompt([USER]))


def test_lone_surrogate_is_refused(local: LocalTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"smile": "\\ud83d"}'}}
    text = local.render(ChatPrompt([USER, {"role": "assistant", "tool_calls": [call]}]))
    with pytest.raises(RequestError, match="surrogate"):
        local.encode([text], add_special_tokens=False)


@pytest.mark.parametrize(
    "chat", [ChatPrompt([USER], chat_template="x"), ChatPrompt([USER], chat_template_kwargs={"chat_template": "x"})]
)
def test_template_of_a_client_is_not_run(local: LocalTokenizer, chat: ChatPrompt) -> None:
    with pytest.raises(TokenizerUnavailableError, match="its own chat template"):
        local.render(chat)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, None),
        ({"vocab_size": 512}, 512),
        ({"vocab_size": 512, "text_config": None}, 512),
        ({"vocab_size": 7}, None),
        ({"text_config": {"vocab_size": 640}}, 640),
    ],
)
def test_vocabulary_size_is_the_larger_of_model_and_tokenizer(
    tmp_path: Path, config: dict[str, object], size: int | None
) -> None:
    tokenizer = trained()
    tokenizer.add_special_tokens([AddedToken("<|added|>", special=True)])
    own = tokenizer.get_vocab_size()
    assert LocalTokenizer.load(saved(tmp_path, tokenizer, **config)).vocab_size == (size or own)
