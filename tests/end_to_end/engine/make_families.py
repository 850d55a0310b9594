"""Make tiny models of random weights, one for each family of tokenizers and chat templates that engines serve.

    python make_families.py DIR

Runs in the engine's own environment. The shapes are those of the families' real files: the kind of tokenizer, its
class, its special tokens, what the template does with roles, tools and thoughts. Mistral's tekken.json is a real one,
which the package mistral-common ships; all other vocabularies are trained on the standard library's sources.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

VOCABULARY = 4096
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# How words are split by the tokenizers of these families.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TOOLS_IN_SYSTEM = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Functions:' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
"""
CHATML = (
    _TOOLS_IN_SYSTEM
    + """\
{%- set found = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content is string and loop.index0 > found.last %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
)
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + (date_string if date_string is defined else '26 Jul 2024') + '\\n\\n' + system }}
{%- if tools %}{{ '\\nFunctions:' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role in ('tool', 'ipython') %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable and message.content is not string %}
{{- message.content | tojson }}{% else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{% set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
DEEPSEEK = """\
{%- if thinking is not defined %}{% set thinking = false %}{% endif %}
{%- set found = namespace(system='', user=false) %}
{%- for message in messages %}{% if message.role == 'system' %}
{%- set found.system = found.system + ('\\n\\n' if found.system else '') + message.content %}{% endif %}{% endfor %}
{{- bos_token }}{{ found.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set found.user = true %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- if found.user %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set found.user = false %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}{{ call.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if found.user and add_generation_prompt %}
{{- '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}{% endif %}
"""
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- if messages[0].content is string %}{% set first = messages[0].content + '\\n\\n' %}
{%- else %}{% set first = messages[0].content[0].text + '\\n\\n' %}{% endif %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- first if loop.first else '' }}
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<start_of_image>' }}{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}
{%- endfor %}{% endif %}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
_DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<think>", "</think>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)


def _sources() -> Iterator[str]:
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:100]:
        yield path.read_text(errors="ignore")


def _byte_level(special: tuple[str, ...], size: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE that splits words as current models do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_sources(), trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return backend


def _metaspace(special: tuple[str, ...]) -> Tokenizer:
    """A BPE over characters with bytes to fall back to, as Gemma's: spaces are a letter of their own."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special),
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    # Without a bound on words, training would merge whole lines.
    words = (" ".join(source.split())[start : start + 12] for source in _sources() for start in range(0, 40_000, 12))
    backend.train_from_iterator(words, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return backend


def _save(folder: Path, backend: Tokenizer, kind: str, template: str | None, **special: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": kind, "model_max_length": 8192, "clean_up_tokenization_spaces": False, **special}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def qwen3(folder: Path) -> None:
    """ChatML with tools, and thoughts that are dropped from the history."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    backend = _byte_level(special)
    _save(folder, backend, "Qwen2Tokenizer", CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None)
    config = Qwen3Config(vocab_size=VOCABULARY, eos_token_id=backend.token_to_id("<|im_end|>"), **_SIZES)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def llama3(folder: Path) -> None:
    """A text begins with a token of its own, which the template writes, too."""
    special = (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|python_tag|>",
    )
    backend = _byte_level(special)
    begin = "<|begin_of_text|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, backend.token_to_id(begin))]
    )
    _save(folder, backend, "PreTrainedTokenizerFast", LLAMA3, bos_token=begin, eos_token="<|eot_id|>")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        bos_token_id=backend.token_to_id(begin),
        eos_token_id=backend.token_to_id("<|eot_id|>"),
        **_SIZES,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def mistral(folder: Path) -> None:
    """Real tekken.json, and no tokenizer.json beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(str(files("mistral_common") / "data" / "tekken_240911.json"), folder / "tekken.json")
    config = MistralConfig(vocab_size=131_072, bos_token_id=1, eos_token_id=2, sliding_window=None, **_SIZES)
    MistralForCausalLM(config).bfloat16().save_pretrained(folder)


def gpt_oss(folder: Path) -> None:
    """Rendered by harmony, whose vocabulary is as large as that of its tokenizer; no template."""
    _save(folder, _byte_level(("<|endoftext|>", "<|return|>")), "PreTrainedTokenizerFast", None, eos_token="<|return|>")
    sizes = _SIZES | {"num_attention_heads": 2, "tie_word_embeddings": False}
    config = GptOssConfig(
        vocab_size=201_088,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=200_002,
        pad_token_id=199_999,
        **sizes,
    )
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)


def deepseek_v31(folder: Path) -> None:
    """A byte-level BPE under the name of Llama's class, which reads other files in another way."""
    backend = _byte_level(_DEEPSEEK_TOKENS)
    _save(
        folder,
        backend,
        "LlamaTokenizerFast",
        DEEPSEEK,
        bos_token=_DEEPSEEK_TOKENS[0],
        eos_token=_DEEPSEEK_TOKENS[1],
        pad_token=_DEEPSEEK_TOKENS[2],
        add_bos_token=True,
        add_eos_token=False,
    )
    _llama_beside(folder, backend)


def deepseek_v32(folder: Path) -> None:
    """No template: the engine has an encoder (`--tokenizer-mode deepseek_v32`)."""
    backend = _byte_level((*_DEEPSEEK_TOKENS, "｜DSML｜"))
    _save(
        folder,
        backend,
        "PreTrainedTokenizerFast",
        None,
        bos_token=_DEEPSEEK_TOKENS[0],
        eos_token=_DEEPSEEK_TOKENS[1],
        pad_token=_DEEPSEEK_TOKENS[2],
    )
    _llama_beside(folder, backend)


def _llama_beside(folder: Path, backend: Tokenizer) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY, bos_token_id=backend.token_to_id(_DEEPSEEK_TOKENS[0]), eos_token_id=0, **_SIZES
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def gemma3(folder: Path) -> None:
    """Spaces are letters, unknown characters bytes; roles must alternate, and the system is part of the first."""
    backend = _metaspace(("<start_of_turn>", "<end_of_turn>", "<start_of_image>"))
    begin = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    _save(
        folder, backend, "GemmaTokenizerFast", GEMMA, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        unk_token="<unk>", add_bos_token=True, add_eos_token=False,
    )  # fmt: skip
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        bos_token_id=begin,
        eos_token_id=backend.token_to_id("<end_of_turn>"),
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
        **_SIZES,
    )
    Gemma3ForCausalLM(config).bfloat16().save_pretrained(folder)


FAMILIES: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (qwen3, llama3, mistral, gpt_oss, deepseek_v31, deepseek_v32, gemma3)
}


def main(directory: str) -> None:
    for name, make in FAMILIES.items():
        folder = Path(directory) / name
        if not (folder / "model.safetensors").exists():
            set_seed(0)
            make(folder)
            print(folder, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
