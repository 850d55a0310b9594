"""Make a GGUF file of random weights from a tokenizer.json: a small Llama for llama.cpp.

python make_gguf.py TOKENIZER_FOLDER FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 128, 2, 4, 2, 256, 8192


def main(folder: Path, file: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"])
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    tokens = sorted((vocabulary | special).items(), key=lambda item: item[1])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token, _ in tokens]
    )
    writer.add_token_merges(merges)
    end = special.get("<|im_end|>", 0)
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(config.get("chat_template") or (folder / "chat_template.jinja").read_text())
    random = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.05, shape).astype(np.float32))

    weights("token_embd.weight", len(tokens), _HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    weights("output.weight", len(tokens), _HIDDEN)
    kv = _HIDDEN // _HEADS * _KV_HEADS
    for layer in range(_LAYERS):
        name = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{name}{norm}.weight", np.ones(_HIDDEN, np.float32))
        weights(f"{name}attn_q.weight", _HIDDEN, _HIDDEN)
        weights(f"{name}attn_k.weight", kv, _HIDDEN)
        weights(f"{name}attn_v.weight", kv, _HIDDEN)
        weights(f"{name}attn_output.weight", _HIDDEN, _HIDDEN)
        weights(f"{name}ffn_gate.weight", _FEED_FORWARD, _HIDDEN)
        weights(f"{name}ffn_up.weight", _FEED_FORWARD, _HIDDEN)
        weights(f"{name}ffn_down.weight", _HIDDEN, _FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
