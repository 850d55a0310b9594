"""The command `python -m benchmarks.tokenize`, which `make bench-tokenize` runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Annotated

import typer

from benchmarks.index.report import write_section
from benchmarks.machine import CORES, description
from benchmarks.tokenize.measure import Comparison, Costs, compare
from benchmarks.tokenize.models import bundled, large

_HOW = (
    "`make bench-tokenize` extends conversations turn by turn to 30,000 tokens, and measures the cost of a turn "
    "before it can be routed: decoding the body, rendering it with the chat template, tokenizing, and hashing all of "
    "it in blocks of 16 tokens. *Whole* is the model's own tokenizer on the whole text. *New* is our tokenization "
    "without earlier turns, *known* is that after the conversation's earlier turns, with its parts. *Uncut* is "
    "tokenization in which only fastokens remembers those turns. The last row is the same body once more. Figures are "
    "milliseconds of CPU time (nothing here waits or runs in parallel), medians of {conversations} conversations. The "
    "variants take turns."
)
_PROOF = (
    "The token ids of every turn were compared with those of the tokenizer on the whole text, and all were equal: "
    "{compared}."
)
_MACHINE = "Machine: {machine}; load average {load_before:.1f} before, {load_after:.1f} after."
_NOISE = (
    " That is more than its cores. Other processes used a share, also of caches: figures are higher than on an idle "
    "machine."
)
_PARTS = ("decode", "render", "tokenize", "uncut", "hash")


def main(
    conversations: Annotated[int, typer.Option(min=1, help="Conversations of each tokenizer.")] = 15,
    markdown: Annotated[Path | None, typer.Option(help="Write section Tokenizing of this file.")] = None,
) -> None:
    """Measure a conversation's turns."""
    load_before, begun = os.getloadavg()[0], time.monotonic()
    measured = {
        "the simulated workers' BPE of 6,144 tokens": compare(bundled(), conversations),
        "a BPE of 32,768 tokens": compare(large(), conversations),
    }
    load_after = os.getloadavg()[0]
    compared = "; ".join(
        f"{found.prompts:,} prompts of {found.tokens:,} tokens with {name}" for name, found in measured.items()
    )
    machine = _MACHINE.format(machine=description(), load_before=load_before, load_after=load_after)
    paragraphs = (
        _HOW.format(conversations=conversations),
        _PROOF.format(compared=compared),
        machine + (_NOISE if max(load_before, load_after) > len(CORES) else ""),
    )
    text = "\n\n".join(
        [*(fill(paragraph, 120) for paragraph in paragraphs), *(_table(*each) for each in measured.items())]
    )
    print(text)
    print(f"\nThe run lasted {time.monotonic() - begun:.0f} s.")
    if markdown is not None:
        write_section(markdown, "Tokenizing", text)


def _table(name: str, found: Comparison) -> str:
    head = [f"tokens, {name.removeprefix('a ')}", "of them new", "whole", "new", "known", *_PARTS, "whole / known"]
    rows = [_row(costs) for costs in found.costs.values()]
    rows.append(_row(found.again))
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    lines = [head, ["-" * (width - 1) + ":" for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _row(costs: Costs) -> list[str]:
    known = costs.milliseconds("known")
    others = [costs.milliseconds(name) if name in costs.seconds else None for name in ("whole", "new")]
    return [
        f"{median(costs.tokens):,.0f}",
        f"{median(costs.new_tokens):,.0f}",
        *(f"{value:.2f}" if value is not None else "" for value in others),
        f"{known:.2f}",
        *(f"{costs.milliseconds(part):.2f}" for part in _PARTS),
        f"{others[0] / known:.0f}" if others[0] is not None else "",
    ]


if __name__ == "__main__":
    typer.run(main)
