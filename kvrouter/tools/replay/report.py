"""What `kvrouter replay` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from kvrouter.tools.replay.check import Mismatch, Score
from kvrouter.tools.replay.publication import Publication


def endpoints_table(publication: Publication) -> Table:
    """Where the sources of a recording are published."""
    table = Table("source", "worker", "rank", "endpoint", "replay endpoint", "topic", box=None)
    for number, published in publication.sources.items():
        source = published.source
        topic = source.topic.decode(errors="replace")
        place = (str(number), str(source.worker), str(source.dp_rank))
        table.add_row(*place, published.endpoint, published.replay_endpoint, topic)
    return table


def score_table(scores: Sequence[Score]) -> Table:
    """A line for each recording."""
    table = Table(Column("recording", overflow="fold"), box=None)
    for name in ("as the engine", "ghosts", "seconds"):
        table.add_column(name, justify="right")
    for score in scores:
        figures = (f"{score.right}/{score.requests}", str(score.ghosts), f"{score.seconds:.1f}")
        table.add_row(score.recording, *figures)
    return table


def mismatch_lines(score: Score) -> list[str]:
    """A line for each request of which the indexer said something else."""
    return [f"{score.recording}: {_line(mismatch)}" for mismatch in score.mismatches]


def _line(mismatch: Mismatch) -> str:
    request = mismatch.request
    answers = ", ".join(
        f"source {number}: {tokens}{' (ghost)' if number in mismatch.ghosts else ''}"
        for number, tokens in mismatch.answers.items()
    )
    prompt = len(request.prompt_token_ids)
    return f"request {request.i}, {prompt} tokens: the engine says {request.cached_tokens}, the indexer {answers}"
