"""The index: which target holds which prefix. The interface of its two implementations, with queries and answers.

`indexer.reference` implements it in Python, `indexer.native` in C++. Methods may be called from several threads. A call
waits for other threads at most as long as they need for a few events or one match.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from indexer.dump import DumpedHolder, DumpedRun, TargetDump
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from indexer.pools.blocks import PoolBlocks
from indexer.targets import HoldingsCounters, Target
from kvevents import EventBatch, RejectedEvent, Tier

if TYPE_CHECKING:
    from indexer.shared_prefixes import SharedPrefixes

Place = TypeVar("Place")

DEFAULT_TENANT = "default"

# Maximum number of a target's blocks that wait for their parent.
ORPHAN_BLOCKS = 65_536
# Maximum number of blocks per target: more than an engine has, even in pages of one token beside a large CPU tier.
MOST_BLOCKS = 4_194_304


class UnknownModelError(LookupError):
    """A model that no registered worker serves for the tenant."""


@dataclass(slots=True, init=False)
class MatchQuery:
    """A tokenized prompt, with everything that separates its blocks from others with the same tokens.

    - `additional_salt`: only registrations with this additional salt match. With None, `cache_salt` selects the
      registrations whose additional salt it is, and the salted blocks of registrations without one.
    """

    model: str
    token_ids: Sequence[int] | PackedPrompt
    adapter: str | None
    cache_salt: str | None
    tenant: str
    additional_salt: str | None

    def __init__(
        self,
        model: str,
        token_ids: Sequence[int] | PackedPrompt,
        adapter: str | None = None,
        cache_salt: str | None = None,
        tenant: str = DEFAULT_TENANT,
        additional_salt: str | None = None,
    ) -> None:
        self.model = model
        self.token_ids = token_ids
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.additional_salt = additional_salt


@dataclass(frozen=True, slots=True)
class HashQuery:
    """Prefix hashes of consecutive blocks. `block_size` may be None if all workers of the model use one size.

    Only registrations with this `additional_salt` match. The hashes include any cache salt.
    """

    model: str
    prefix_hashes: list[int]
    block_size: int | None = None
    tenant: str = DEFAULT_TENANT
    additional_salt: str | None = None


@dataclass(slots=True, init=False)
class Match:
    """The tokens of a prompt that one target holds. `tiers` counts each matched block once, in its fastest tier.

    The constructor is written by hand, because mypyc does not compile a generated one and a query makes thousands.
    """

    target: Target
    matched_tokens: int
    tiers: dict[Tier, int]

    def __init__(self, target: Target, matched_tokens: int, tiers: dict[Tier, int]) -> None:
        self.target = target
        self.matched_tokens = matched_tokens
        self.tiers = tiers


class TargetRows:
    """A caller's numbering of targets in rows. A row has at most one target, and may have none."""

    def __init__(self, rows: int, row_of: dict[Target, int]) -> None:
        self.nothing = array("I", bytes(4 * rows))  # the matched tokens of an unknown prompt: a template to copy
        self.row_of = row_of
        self.numbers = array("i")  # by a target's number in a native index: its row, or -1
        self.numbering = -1  # the version of the native index's numbering that `numbers` was made from


class RowMatches:
    """The tokens of a prompt that the targets in rows hold. `transfers`: for some, those in CPU memory and on disk."""

    __slots__ = ("tokens", "transfers")

    def __init__(self, rows: TargetRows) -> None:
        self.tokens = rows.nothing[:]
        self.transfers: dict[int, tuple[int, int]] = {}

    def add(self, row: int, tokens: int, cpu: int, disk: int) -> None:
        """Record a match of a row if it has more tokens than the recorded one."""
        if tokens > self.tokens[row]:
            self.tokens[row] = tokens
            if cpu or disk:
                self.transfers[row] = cpu, disk
            else:
                self.transfers.pop(row, None)

    def clear(self, row: int) -> None:
        """Remove the match of a row."""
        self.tokens[row] = 0
        self.transfers.pop(row, None)


# A tree of prefixes, the row of each of its holders, and how many chunks lie between two of its hashes.
TreeRows: TypeAlias = "tuple[SharedPrefixes, array[int], int]"


# The result of a choice:
# - the rows with the lowest cost, in order
# - the tokens of the prompt that count, by row
# - those in CPU memory and on disk, for rows that have any there
# - the tokens without sent prefixes, for rows in which they differ
# - the rows with more tokens in flight than in the index
# - the tree and the holder of rows that are not known. Until they are, the choice does not count
# - where the parts end for which other sessions pay, and the share that these pay
# - the chunk hashes of the prompt
ChosenRows: TypeAlias = """tuple[
    list[int],
    array[int],
    dict[int, tuple[int, int]],
    dict[int, int],
    list[int],
    list[tuple[int, int]],
    list[int],
    list[float],
    array[int],
]"""


class ChoiceQuestion:
    """The input of a choice of rows beside the prompt. One object serves all prompts, and each sets its fields.

    - `roots`: the block sizes of the model, each with the hash that prompts start from.
    - `chunking`: the hash that the chunks of trees start from, and a chunk's tokens.
    - `units`: an `array("I")` of each row's block size; 0 if it is not known.
    - `in_flight`, `sent`: the trees of prefixes in flight, and of sent prefixes.
    - `lines`: `fixed`, `per_token` and `shares` by row, as in `router.policies.linear`.
    - `prices`: the charged tokens, the least of them, the prices of a token in CPU memory and on disk, and `near`.
    - `demand`: forks of prompts by hash, the stride of read hashes, the time, the horizon, and the spare share of time.
      None if each prompt pays for itself.
    - `excluded`: rows that are not chosen.
    """

    __slots__ = ("chunking", "demand", "excluded", "in_flight", "lines", "prices", "roots", "rows", "sent", "units")

    def __init__(
        self,
        rows: TargetRows,
        lines: tuple[array[float], array[float], array[float]],
        chunking: tuple[int, int],
    ) -> None:
        self.rows = rows
        self.lines = lines
        self.chunking = chunking
        self.roots: list[tuple[int, int]] = []
        self.units = rows.nothing
        self.in_flight: list[TreeRows] = []
        self.sent: TreeRows | None = None
        self.prices: tuple[int, int, float, float, float] = (0, 0, 0.0, 0.0, 0.0)
        self.demand: tuple[dict[int, tuple[int, float, float]], int, float, float, float] | None = None
        self.excluded: list[int] = []


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """State of one target in the index.

    - `orphans`: number of blocks that wait for their parent.
    - `window`: the fewest last blocks that any cache group keeps; None if every group keeps whole prefixes.
    """

    blocks: dict[Tier, int]
    block_sizes: frozenset[int]
    orphans: int
    counters: HoldingsCounters
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of applying a batch: its unreadable or invalid events, and whether it cleared the whole cache."""

    rejected: list[RejectedEvent]
    cleared: bool


class Index(ABC):
    """Prefix holdings of all targets.

    - `secret`: a key that makes prefix hashes unpredictable without it.
    - `block_size_changes`: counts every possible change of any target's block sizes.
    - `cleared`: targets that were cleared, by an event or by `clear`. The reader of an entry removes it.
    """

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.block_size_changes = 0
        self.cleared: set[Target] = set()

    @abstractmethod
    def add(self, target: Target, adapter: str | None = None, capacity: int | None = None) -> None:
        """Add a target without blocks, unless it is known. `adapter`: the LoRA of events that name none."""

    @abstractmethod
    def attach(self, target: Target, pool: PoolBlocks) -> None:
        """Let the events of a target, which is known, report the chain and the blocks of a pool."""

    @abstractmethod
    def apply_payload(self, target: Target, payload: bytes) -> Applied:
        """Apply the payload of a stream frame, event by event. Raises MalformedBatchError if it is no event batch."""

    @abstractmethod
    def apply(self, target: Target, batch: EventBatch) -> list[RejectedEvent]:
        """Apply a batch in order. Returns its invalid events, which change nothing."""

    @abstractmethod
    def clear(self, target: Target) -> None:
        """Remove all blocks of a target."""

    @abstractmethod
    def drop(self, target: Target) -> None:
        """Remove a target and its blocks."""

    def match(self, namespace: Namespace, prompt: PackedPrompt, blocks: int | None = None) -> list[Match]:
        """Return the matches of the targets that hold a part of a prompt's first `blocks` blocks (None: all full ones).

        The prompt is hashed only up to about the last matched block: the surplus is at most one run of the tree.
        """
        block_size = namespace.block_size
        limit = len(prompt) // block_size if blocks is None else blocks
        return self.match_from(namespace_hash(namespace, self.secret), block_size, prompt, limit)

    @abstractmethod
    def match_from(
        self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, tier: Tier | None = None
    ) -> list[Match]:
        """Return the matches of a prompt's first `blocks` blocks in the namespace whose hash is `root`.

        - `tier`: the only tier whose blocks count; None: all tiers.
        """

    @abstractmethod
    def match_hashes(self, hashes: array[int], block_size: int) -> list[Match]:
        """Return the matches of a prompt that is given by its prefix hashes. `block_size` is in tokens."""

    def match_rows(
        self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, rows: TargetRows, found: RowMatches
    ) -> None:
        """Add the matches that `match_from` would return to `found`, for the targets that have a row."""
        for match in self.match_from(root, block_size, prompt, blocks):
            row = rows.row_of.get(match.target)
            if row is not None:
                tiers = match.tiers
                found.add(row, match.matched_tokens, tiers[Tier.CPU], tiers[Tier.DISK] + tiers[Tier.UNKNOWN])

    def choose_rows(
        self,
        question: ChoiceQuestion,  # noqa: ARG002
        token_ids: PackedPrompt,  # noqa: ARG002
        identity: PackedPrompt,  # noqa: ARG002
    ) -> ChosenRows | None:
        """Match a prompt, add prefixes in flight and sent prefixes, and find the rows with the lowest cost.

        `identity`: the prompt as trees know it, in chunks.
        Returns None if the implementation cannot do this in one call.
        """
        return None

    @abstractmethod
    def dump(self, target: Target) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        """Return the blocks of a target in the form of a dump; empty lists if the target is unknown."""

    @abstractmethod
    def restore(self, target: Target, dump: TargetDump) -> None:
        """Add the blocks of a dump to a target without blocks. Raises DumpError; the target then has no blocks."""

    @abstractmethod
    def status(self, target: Target) -> TargetStatus | None:
        """Return the state of a target; None if it is unknown."""

    def evictions(self, target: Target) -> int:
        """Return how many blocks events have removed from a target so far."""
        status = self.status(target)
        return 0 if status is None else status.counters.removed

    def held(self, target: Target) -> int:
        """Return how many blocks a target holds in its engine's own memory."""
        status = self.status(target)
        return 0 if status is None else status.blocks[Tier.GPU]

    @abstractmethod
    def block_sizes(self, targets: Iterable[Target]) -> set[int]:
        """Return the block sizes, in tokens, of all blocks that these targets ever stored."""

    @abstractmethod
    def sweep(self) -> None:
        """Free a part of the memory of cleared and dropped targets."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the invariants of the tree (for tests)."""

    @property
    @abstractmethod
    def runs(self) -> int:
        """Number of block runs in the tree."""


def apply_and_report(
    reports: list[tuple[Place, Applied | Exception]], place: Place, apply: Callable[[], Applied]
) -> None:
    """Apply a payload. Append its place and result to `reports` if it failed, rejected events or cleared the cache."""
    try:
        applied = apply()
    except Exception as error:  # other payloads are still applied
        reports.append((place, error))
    else:
        if applied.rejected or applied.cleared:
            reports.append((place, applied))


def best_first(targets: Collection[Target], found: Iterable[Match]) -> list[Match]:
    """Return the best match of each of these targets, the most tokens first."""
    best = [match for match in _best(found).values() if match.target in targets]
    return sorted(best, key=by_tokens)


def by_tokens(match: Match) -> int:
    """Return the key that sorts matches by their tokens, the most first."""
    return -match.matched_tokens


def _best(found: Iterable[Match]) -> dict[Target, Match]:
    best: dict[Target, Match] = {}
    for match in found:
        known = best.get(match.target)
        if known is None or match.matched_tokens > known.matched_tokens:
            best[match.target] = match
    return best
