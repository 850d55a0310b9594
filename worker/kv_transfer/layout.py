"""The layout of a rank's KV pages in memory: comparison of two layouts, and the copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from worker.kv_transfer.ranks import Rank, Topology, head_range
from worker.kv_transfer.transfer import (
    Ranges,
    Region,
    Writes,
    group_runs,
    join_ranges,
    join_writes,
    page_ranges,
    page_writes,
)

KVLayout = Literal["NHD", "HND", "MLA"]
Pages = NDArray[np.int64]

_Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


@dataclass(slots=True, kw_only=True)
class KVArgs:
    """The KV memory of a rank, in the field's names. Pointers are host addresses, lengths are bytes.

    - `kv_data_*`: the layers' buffers, all K and then all V (MLA: one for each layer). Page `p` of buffer `i` has
      `kv_item_lens[i]` bytes at `p * kv_item_lens[i]`.
    - `aux_data_*`: further data of a request, for example its first token; one item for each request.
    - `kv_layout`: the order inside a page: NHD [token, head, dim], HND [head, token, dim], MLA [token, latent].
    - `prefill_start_layer`: the model layer of the first buffer, for a pipeline stage.
    """

    kv_data_ptrs: Sequence[int]
    kv_data_lens: Sequence[int]
    kv_item_lens: Sequence[int]
    page_size: int
    kv_cache_dtype: str
    total_kv_head_num: int = 1
    kv_layout: KVLayout = "NHD"
    aux_data_ptrs: Sequence[int] = ()
    aux_data_lens: Sequence[int] = ()
    aux_item_lens: Sequence[int] = ()
    prefill_start_layer: int = 0


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """A buffer of `length` bytes at `pointer`, in items of `item` bytes."""

    pointer: _Address
    length: _Length
    item: _Length

    @property
    def items(self) -> int:
        return self.length // self.item


class Layout(msgspec.Struct, frozen=True):
    """The memory layout of a rank, which two ranks compare, and by which a sender addresses the receiver's pages."""

    page_size: _Size
    kv_cache_dtype: Annotated[str, msgspec.Meta(max_length=64)]
    kv_layout: KVLayout
    total_heads: _Size
    tp_size: _Size
    tp_rank: _Small
    start_layer: _Small
    kv: Annotated[list[Buffer], msgspec.Meta(min_length=1, max_length=8192)]
    aux: Annotated[list[Buffer], msgspec.Meta(max_length=64)]

    @property
    def parts(self) -> int:
        """The number of buffers of one layer."""
        return 1 if self.kv_layout == "MLA" else 2

    @property
    def layers(self) -> range:
        return range(self.start_layer, self.start_layer + len(self.kv) // self.parts)

    @property
    def heads(self) -> range:
        return head_range(self.total_heads, self.tp_size, self.tp_rank)

    @property
    def pages(self) -> int:
        """The number of pages in the pool; each page index is smaller."""
        return min(buffer.items for buffer in self.kv)

    @property
    def aux_items(self) -> int:
        """The number of items in the aux buffers; each aux index is smaller."""
        return min((buffer.items for buffer in self.aux), default=0)

    def regions(self) -> list[Region]:
        """Return the memory to register with the transfer engine."""
        return [Region(buffer.pointer, buffer.length) for buffer in (*self.kv, *self.aux)]

    def check(self) -> None:
        """Check the layout. Raises ValueError for a contradiction."""
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"TP rank {self.tp_rank} does not exist in TP {self.tp_size}")
        if len(self.kv) % self.parts:
            raise ValueError(f"{len(self.kv)} KV buffers: layout {self.kv_layout} needs K and V for each layer")
        heads = len(self.heads)
        for number, buffer in enumerate(self.kv):
            if buffer.item % (heads * self.page_size):
                raise ValueError(
                    f"KV buffer {number} has {buffer.item} bytes a page: not a multiple of {heads} heads "
                    f"x page_size {self.page_size}"
                )
        for buffer in (*self.kv, *self.aux):
            if buffer.length < buffer.item or buffer.pointer + buffer.length > 2**63:
                raise ValueError(f"a buffer of {buffer.length} bytes at {buffer.pointer} has no item of {buffer.item}")

    def ranges(self, pages: Pages, aux_index: int | None) -> Ranges:
        """Return the bytes of these pages in every layer, and of one aux item. Raises ValueError for invalid pages."""
        self.check_pages(pages)
        if len(np.unique(pages)) != len(pages):
            raise ValueError("kv_indices has a page twice: each page receives one part of the prompt")
        kv = page_ranges(pages, [b.pointer for b in self.kv], [b.item for b in self.kv])
        if aux_index is None:
            return kv
        self.check_aux(aux_index)
        aux = page_ranges([aux_index], [b.pointer for b in self.aux], [b.item for b in self.aux])
        return join_ranges(kv, aux)

    def check_pages(self, pages: Pages) -> None:
        if len(pages) and not (pages.min() >= 0 and pages.max() < self.pages):
            wrong = pages[(pages < 0) | (pages >= self.pages)][0]
            raise ValueError(f"page {wrong} does not exist: there are {self.pages}")

    def check_aux(self, aux_index: int) -> None:
        if not 0 <= aux_index < self.aux_items:
            raise ValueError(f"aux_index {aux_index} does not exist: there are {self.aux_items} items")


def layout_of(args: KVArgs, topology: Topology, rank: Rank) -> Layout:
    """Return the layout of a rank's own memory. Raises ValueError, which names the field, for a contradiction."""
    mla = args.kv_layout == "MLA"
    layout = Layout(
        page_size=args.page_size,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_layout=args.kv_layout,
        total_heads=1 if mla else args.total_kv_head_num,
        tp_size=topology.tp,
        tp_rank=rank.tp,
        start_layer=args.prefill_start_layer,
        kv=_buffers("kv", args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
        aux=_buffers("aux", args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
    )
    try:
        msgspec.convert(msgspec.to_builtins(layout), Layout)
    except msgspec.ValidationError as error:
        raise ValueError(f"KVArgs: {error}") from error
    layout.check()
    return layout


def _buffers(kind: str, pointers: Sequence[int], lengths: Sequence[int], items: Sequence[int]) -> list[Buffer]:
    if not len(pointers) == len(lengths) == len(items):
        raise ValueError(
            f"KVArgs: {kind}_data_ptrs, {kind}_data_lens and {kind}_item_lens have {len(pointers)}, {len(lengths)} and "
            f"{len(items)} entries: give one of each for every buffer"
        )
    return [Buffer(*map(int, values)) for values in zip(pointers, lengths, items, strict=True)]


def mismatch(prefill: Layout, decode: Layout) -> str | None:
    """Return why pages of one layout cannot be written into the other, with both values; `None` if they can."""
    for field in ("page_size", "kv_cache_dtype", "kv_layout", "total_heads"):
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            return f"{field} differs: prefill has {ours}, decode {theirs}"
    if not (decode.layers.start <= prefill.layers.start and prefill.layers.stop <= decode.layers.stop):
        return f"layers differ: prefill has {_span(prefill.layers)}, decode {_span(decode.layers)}"
    for source, destination in _paired_buffers(prefill, decode):
        ours, theirs = source.item // len(prefill.heads), destination.item // len(decode.heads)
        if ours != theirs:
            return f"bytes of one head in a page differ: prefill has {ours}, decode {theirs}"
    prefill_aux, decode_aux = [b.item for b in prefill.aux], [b.item for b in decode.aux]
    if prefill_aux != decode_aux:
        return f"aux buffers differ: prefill has items of {prefill_aux} bytes, decode {decode_aux}"
    return None


def _span(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}"


def _paired_buffers(prefill: Layout, decode: Layout) -> list[tuple[Buffer, Buffer]]:
    """Return every buffer of the prefill rank with that of the same layer on the decode rank."""
    offset = prefill.layers.start - decode.layers.start
    ours, theirs = len(prefill.layers), len(decode.layers)
    return [
        (prefill.kv[part * ours + layer], decode.kv[part * theirs + offset + layer])
        for part in range(prefill.parts)
        for layer in range(ours)
    ]


def kv_writes(prefill: Layout, decode: Layout, sources: Pages, destinations: Pages) -> Writes:
    """Return the copies of pages in every layer, for the heads that both ranks hold. Raises ValueError."""
    prefill.check_pages(sources)
    decode.check_pages(destinations)
    pairs = _paired_buffers(prefill, decode)
    runs = group_runs(sources, destinations)
    if prefill.heads == decode.heads:
        pointers = [ours.pointer for ours, _ in pairs], [theirs.pointer for _, theirs in pairs]
        return page_writes(runs, *pointers, [ours.item for ours, _ in pairs])
    return join_writes(*(_head_writes(prefill, decode, pair, sources, destinations) for pair in pairs))


def _head_writes(
    prefill: Layout, decode: Layout, pair: tuple[Buffer, Buffer], sources: Pages, destinations: Pages
) -> Writes:
    """Return one buffer's copies between ranks of different heads: one for each token (NHD) or page (HND)."""
    first = max(prefill.heads.start, decode.heads.start)
    count = min(prefill.heads.stop, decode.heads.stop) - first
    rows = prefill.page_size if prefill.kv_layout == "NHD" else 1
    head = pair[0].item // len(prefill.heads) // rows  # bytes of one head in one row

    def addresses(buffer: Buffer, heads: range, pages: Pages) -> NDArray[np.uint64]:
        row = np.arange(rows, dtype=np.int64) * (buffer.item // rows)
        start = buffer.pointer + (first - heads.start) * head
        return (start + pages[:, None] * buffer.item + row).ravel().astype(np.uint64)

    return Writes(
        addresses(pair[0], prefill.heads, sources),
        addresses(pair[1], decode.heads, destinations),
        np.full(len(sources) * rows, count * head, np.uint64),
    )


def aux_writes(prefill: Layout, decode: Layout, source: int, destination: int) -> Writes:
    """Return the copies of one item of every aux buffer. Raises ValueError for an item that does not exist."""
    prefill.check_aux(source)
    decode.check_aux(destination)
    runs = group_runs([source], [destination])
    pointers = [b.pointer for b in prefill.aux], [b.pointer for b in decode.aux]
    return page_writes(runs, *pointers, [b.item for b in prefill.aux])
