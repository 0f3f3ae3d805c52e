"""Tiles of rows: how they are read, written, and multiplied.

A tile is a tuple of pieces ``[ROWS, WIDTH]`` side by side.  Triton's shapes are powers of two, and
a head dim of 80 costs less as 64 + 16 columns than as 128.

A member of SPEC reaches another device function by way of a local ``tl.constexpr``: Triton 3.6
would hand over a bare int.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

from flash_kernel._triton.config import PACKED_ROWS

# Triton's interpreter multiplies bfloat16 tiles as if their bits were integers, so while it
# interprets, bfloat16 tiles are widened as they are loaded
INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))

PRETENDED_ROWS: tl.constexpr = tl.constexpr(PACKED_ROWS)


class Rows(NamedTuple):
    """The rows of one head of a tensor: what `load_rows` reads and `store_rows` writes."""

    source: Any  # a descriptor over [B, H, rows, D], or a pointer to the first row's first element
    batch: Any
    head: Any
    start: Any  # the first row, where sequences are packed; 0 elsewhere
    num_rows: Any
    head_dim: Any
    stride_row: Any
    stride_col: Any
    pages: Any  # pointer to the numbers of the pages that hold the rows, where SPEC has pages
    stride_page: Any


@triton.jit
def rows_of(tensor, strides, batch, head, start, num_rows, head_dim, SPEC: tl.constexpr):
    """Return the `Rows` of one head; ``tensor`` is a pointer or a descriptor, as SPEC says."""
    stride_row = tl.cast(strides[2], tl.int64)
    stride_col = tl.cast(strides[3], tl.int64)
    if not SPEC.USE_DESCRIPTORS:
        # 64 bits: a tensor, and one head of a strided view, may span more than 2^31 elements
        tensor += batch * tl.cast(strides[0], tl.int64) + head * tl.cast(strides[1], tl.int64)
        tensor += start * stride_row
    head_dim = tl.cast(head_dim, tl.int32)
    # what is not in pages never looks at the last two
    return Rows(
        tensor, batch, head, start, num_rows, head_dim, stride_row, stride_col, tensor, stride_row
    )


@triton.jit
def in_pages(x, pages, stride_page):
    """Return `Rows` x as rows of pages, whose numbers lie at the pointer ``pages`` in order."""
    return Rows(
        x.source, x.batch, x.head, x.start, x.num_rows, x.head_dim, x.stride_row, x.stride_col,
        pages, tl.cast(stride_page, tl.int64),
    )  # fmt: skip


@triton.jit
def piece_offsets(
    x, row, FIRST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Offsets and in-bounds mask, both ``[ROWS, WIDTH]``, from ``row`` and column FIRST on."""
    rows = row + tl.arange(0, ROWS)
    cols = FIRST + tl.arange(0, WIDTH)
    inside = rows < x.num_rows
    if SPEC.PAGE_SIZE > 0:
        pages = tl.load(x.pages + rows // SPEC.PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        row_offsets = pages * x.stride_page + (rows % SPEC.PAGE_SIZE) * x.stride_row
    else:
        row_offsets = rows.to(tl.int64) * x.stride_row
    offsets = row_offsets[:, None] + cols[None, :] * x.stride_col
    return offsets, inside[:, None] & (cols < x.head_dim)[None, :]


@triton.jit
def coordinates(x, row, SPEC: tl.constexpr):
    """Where a descriptor finds the tile of `Rows` x that starts at ``row``."""
    if SPEC.IS_PACKED:
        # the sequence's last row is the descriptor's last, so that both end at once
        in_last = PRETENDED_ROWS - x.num_rows + row
        at = (PRETENDED_ROWS, x.start + x.num_rows, x.head, in_last, 0)
    else:
        at = (x.batch, x.head, row, 0)
    return at


@triton.jit
def load_piece(
    x, row, FIRST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Columns from FIRST of the rows from ``row`` of `Rows` x, ``[ROWS, WIDTH]``."""
    if SPEC.USE_DESCRIPTORS:
        tile = x.source.load(coordinates(x, row, SPEC)).reshape(ROWS, WIDTH)
    else:
        offsets, mask = piece_offsets(x, row, FIRST, WIDTH, ROWS, SPEC)
        tile = tl.load(x.source + offsets, mask=mask, other=0.0)
    if INTERPRETED and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_rows(x, row, ROWS: tl.constexpr, WIDTHS: tl.constexpr, SPEC: tl.constexpr):
    """Rows ``row .. row + ROWS`` of `Rows` x as a tile, zero outside the tensor."""
    tile = ()
    for i in tl.static_range(len(WIDTHS)):
        piece = load_piece(x, row, i * tl.constexpr(WIDTHS[0]), tl.constexpr(WIDTHS[i]), ROWS, SPEC)
        tile += (piece,)
    return tile


@triton.jit
def store_piece(x, piece, row, FIRST: tl.constexpr, SPEC: tl.constexpr):
    """Write a piece where `load_piece` would read it, clipped to the tensor."""
    ROWS: tl.constexpr = piece.shape[0]
    WIDTH: tl.constexpr = piece.shape[1]
    if SPEC.USE_DESCRIPTORS:
        piece = piece.to(x.source.dtype).reshape(x.source.block_shape)
        x.source.store(coordinates(x, row, SPEC), piece)
    else:
        offsets, mask = piece_offsets(x, row, FIRST, WIDTH, ROWS, SPEC)
        tl.store(x.source + offsets, piece.to(x.source.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(x, tile, row, SPEC: tl.constexpr):
    """Write a tile where `load_rows` would read it, clipped to the tensor."""
    for i in tl.static_range(len(tile)):
        store_piece(x, tile[i], row, i * tile[0].shape[1], SPEC)


@triton.jit
def zero_rows(ROWS: tl.constexpr, WIDTHS: tl.constexpr):
    """Return a tile of float32 zeros."""
    tile = ()
    for i in tl.static_range(len(WIDTHS)):
        tile += (tl.zeros([ROWS, tl.constexpr(WIDTHS[i])], tl.float32),)
    return tile


@triton.jit
def scale_rows(tile, factor):
    """Return a tile times ``factor``, a number or one ``[ROWS, 1]`` for each row."""
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled += (tile[i] * factor,)
    return scaled


@triton.jit
def row_products(a, b, SPEC: tl.constexpr):
    """Return ``a b^T`` of two tiles: the products of their rows, ``[ROWS of a, ROWS of b]``."""
    products = tl.dot(a[0], b[0].T, input_precision=SPEC.PRECISION)
    for i in tl.static_range(1, len(a)):
        products = tl.dot(a[i], b[i].T, products, input_precision=SPEC.PRECISION)
    return products


@triton.jit
def add_weighted_rows(acc, weights, b, SPEC: tl.constexpr):
    """Return the tile ``acc + weights b``; ``weights [ROWS of acc, ROWS of b]``."""
    weights = weights.to(b[0].dtype)
    total = ()
    for i in tl.static_range(len(b)):
        total += (tl.dot(weights, b[i], acc[i], input_precision=SPEC.PRECISION),)
    return total
