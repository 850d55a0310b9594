"""Make a chat model of random weights, with a BPE tokenizer trained on the standard library's sources.

    python make_model.py DIR HIDDEN_SIZE LAYERS HEADS KV_HEADS

Runs in the engine's own environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

VOCABULARY = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()  # transformers 5 has it for this model, whatever its files say
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:150]
    backend.train_from_iterator(
        (source.read_text(errors="ignore") for source in sources),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(directory: str, hidden_size: int, layers: int, heads: int, kv_heads: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    set_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    print(f"{directory}: {model.num_parameters() / 1e6:.1f} million parameters")


if __name__ == "__main__":
    make_model(sys.argv[1], *map(int, sys.argv[2:6]))
