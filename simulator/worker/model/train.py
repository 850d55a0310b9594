"""Train the bundled tokenizer: a byte-level BPE over the prose of the Python installation that runs this.

    python simulator/worker/model/train.py

writes tokenizer.json and tokenizer_config.json beside itself. The same Python release gives the same files.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 6144
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# ChatML. Content may be a string or a list of text parts.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\nYou may call these functions:' }}
{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + ('system' if message['role'] == 'developer' else message['role']) + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{ '<tool_call>' + call['function']['name'] + ' ' + call['function']['arguments'] | tojson + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def corpus() -> Iterator[str]:
    """Return the language reference that pydoc shows, and the docstrings of the standard library."""
    for _, text in sorted(topics.items()):
        yield text
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    here = Path(__file__).parent
    here.joinpath("tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    here.joinpath("tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
