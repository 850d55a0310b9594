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

import torch
from family_templates import CHATML, DEEPSEEK, GEMMA, IDEFICS, LLAMA3
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    set_seed,
)

VOCABULARY = 4096
# Weights are large, so that an answer depends on every token of its prompt.
_SIZES = {
    "initializer_range": 0.15,
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

_DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<think>", "</think>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)


def _sources() -> Iterator[str]:
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:100]:
        yield path.read_text(errors="ignore")


def _byte_level(special: tuple[str, ...], size: int = VOCABULARY, words: str = _WORDS) -> Tokenizer:
    """A byte-level BPE that splits words as current models do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
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


def _chatml(folder: Path) -> int:
    """A tokenizer with ChatML's template. The id of the token that ends an answer."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    # As the class reads all its files.
    backend = _byte_level(special, words=_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"))
    backend.normalizer = normalizers.NFC()
    _save(folder, backend, "Qwen2Tokenizer", CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None)
    return int(backend.token_to_id("<|im_end|>"))


def qwen3(folder: Path) -> None:
    """ChatML with tools, and thoughts that are dropped from the history."""
    config = Qwen3Config(vocab_size=VOCABULARY, eos_token_id=_chatml(folder), **_SIZES)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def qwen3_next(folder: Path) -> None:
    """A layer of linear attention beside one of full attention, whose heads are as large as the CPU's kernel wants.

    vLLM has no tied embeddings for this family, and leaves an output layer without weights as it is.
    """
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        eos_token_id=_chatml(folder),
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **_SIZES | {"head_dim": 256, "num_key_value_heads": 2, "tie_word_embeddings": False},
    )
    Qwen3NextForCausalLM(config).bfloat16().save_pretrained(folder)


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


def llama3_eagle(folder: Path) -> None:
    """A draft model of llama3 (EAGLE): one layer like its first, and a projection of its hidden states."""
    beside = folder.parent / "llama3"
    weights = load_file(beside / "model.safetensors")
    first = "model.layers.0."
    draft = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith(first)}
    draft.pop("layers.0.input_layernorm.weight")
    size = _SIZES["hidden_size"]
    draft |= {"embed_tokens.weight": weights["model.embed_tokens.weight"]}
    draft |= {"fc.weight": torch.randn(size, 2 * size).mul(0.05).bfloat16()}
    config = json.loads((beside / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(draft, folder / "model.safetensors", {"format": "pt"})


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


def idefics3(folder: Path) -> None:
    """Images: each becomes 16 tokens between two others."""
    image, begin, end, pad = "<image>", "<|begin_of_text|>", "<end_of_utterance>", "<pad>"
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    backend = _byte_level((begin, end, "<fake_token_around_image>", image, "<global-img>", pad, *cells))
    _save(
        folder, backend, "PreTrainedTokenizerFast", IDEFICS, bos_token=begin, eos_token=end, pad_token=pad,
        fake_image_token="<fake_token_around_image>", image_token=image, end_of_utterance_token=end,
        global_image_token="<global-img>",
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        bos_token_id=backend.token_to_id(begin),
        eos_token_id=backend.token_to_id(end),
        pad_token_id=backend.token_to_id(pad),
        **_SIZES,
    )
    sides = {"image_size": 112, "patch_size": 14}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2} | sides
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.to_dict(),
        image_token_id=backend.token_to_id(image),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=backend.token_to_id(pad),
    )
    Idefics3ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": 112},
        "size": {"longest_edge": 224},
        "resample": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 16})
    )


FAMILIES: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        *(qwen3, llama3, llama3_eagle, mistral, gpt_oss, deepseek_v31, deepseek_v32, gemma3),
        *(qwen3_next, idefics3),
    )
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
