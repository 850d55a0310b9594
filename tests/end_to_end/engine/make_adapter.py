"""Make a LoRA adapter of random weights for a model of `make_model.py`.

    python make_adapter.py DIR MODEL_DIR SEED

Runs in the engine's own environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK = 8


def make_adapter(directory: str, model: str, seed: int) -> None:
    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(seed)
    head = config.hidden_size // config.num_attention_heads
    outputs = {"q_proj": config.hidden_size, "v_proj": head * config.num_key_value_heads}
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, size in outputs.items():
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{of}.lora_A.weight"] = torch.randn(RANK, config.hidden_size, dtype=torch.bfloat16)
            weights[f"{of}.lora_B.weight"] = torch.randn(size, RANK, dtype=torch.bfloat16)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file(weights, folder / "adapter_model.safetensors")


if __name__ == "__main__":
    make_adapter(sys.argv[1], sys.argv[2], int(sys.argv[3]))
