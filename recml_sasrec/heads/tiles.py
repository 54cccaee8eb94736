"""Tile sizes of the TPU kernel and where it accumulates dh, from the shapes and the chip's own figures.

The kernel's grid is (V tiles, T tiles), tokens innermost. A step holds one [items, tokens] tile of logits in registers
and VMEM, a sub-tile at a time; what stays in VMEM between steps is counted here. dh is touched by every V tile:

    resident  dh of all tokens stays in VMEM, [D, T] float32: no traffic at all
    hbm       dh stays in HBM and each step reads, adds and writes its part: 8*T*D bytes a V tile
    blocks    the tokens are cut into blocks whose dh is resident; the table is swept once a block and its gradient,
              float32, is read, added to and written back: 8*V*D bytes a block
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jax.experimental.pallas import tpu as pltpu

Accumulation = Literal["resident", "hbm", "blocks"]
_MIB = 2**20
_LANES = 128
_UNROLLED = 2**20  # logits of a grid step: its sub-tiles are unrolled, so this bounds the program's size


@dataclass(frozen=True)
class Chip:
    """What tile sizes depend on, per core."""

    name: str
    vmem_bytes: int
    mxu_width: int


CHIPS = {
    "v4": Chip("v4", 16 * _MIB, 128),
    "v5e": Chip("v5e", 128 * _MIB, 128),
    "v5p": Chip("v5p", 64 * _MIB, 128),
    "v6e": Chip("v6e", 128 * _MIB, 256),
    "7x": Chip("7x", 64 * _MIB, 256),
}


def current_chip() -> Chip:
    """The chip being traced for, by ``pltpu.get_tpu_info()``; v4's small VMEM, which fits all, where there is none.

    Off-TPU, an ahead-of-time compilation names its chip by tracing inside ``jax.set_mesh`` of a topology's mesh.
    """
    try:
        info = pltpu.get_tpu_info()
    except (ValueError, RuntimeError, NotImplementedError):
        return CHIPS["v4"]
    name = str(info.chip_version)
    return Chip(name, info.vmem_capacity_bytes, info.mxu_column_size)


@dataclass(frozen=True)
class Plan:
    """Sizes of one kernel call; ``str(plan)`` is a line for logs."""

    chip: str
    dh: Accumulation
    items: int  # rows of the table in a V tile
    tokens: int  # tokens of a T tile
    sub_items: int  # a sub-tile is what is between two matmuls: [sub_items, sub_tokens] logits
    sub_tokens: int
    block: int  # tokens of one kernel call, a multiple of ``tokens``; all of them unless dh == "blocks"
    blocks: int
    vmem_bytes: int  # what the kernel is counted to need
    vmem_limit: int  # what the compiler is allowed, its own scratch included

    def __str__(self) -> str:
        calls = f"{self.blocks} blocks of {self.block} tokens" if self.blocks > 1 else f"{self.block} tokens"
        return (
            f"{self.chip}: {calls}, tile {self.items} items x {self.tokens} tokens by {self.sub_items} x "
            f"{self.sub_tokens}, dh {self.dh}, VMEM {self.vmem_bytes / _MIB:.1f} of {self.vmem_limit / _MIB:.0f} MiB"
        )


def plan(
    tokens: int,
    items: int,
    width: int,
    itemsize: int,
    chip: Chip,
    *,
    gradients: bool = True,
    tile: int | None = None,
    token_tile: int | None = None,
    dh: Accumulation | None = None,
    block: int | None = None,
) -> Plan:
    """Chooses sizes for [tokens, items] logits of a width, ``itemsize`` bytes an element of hidden and table.

    Args:
      gradients: False for the forward-only kernel, which accumulates no dh.
      tile, token_tile: override the items or tokens of a tile; rounded up to what the hardware can address.
      dh: override where dh is accumulated.
      block: override the tokens of a block; implies ``dh="blocks"`` where it is less than all tokens.

    Raises:
      ValueError: what was asked for does not fit the chip's VMEM; names what would.
    """
    sub = _sub_tile(tokens, items, chip, tile, token_tile)
    limit = chip.vmem_bytes * 7 // 8
    budget = limit * 3 // 4  # the rest is the compiler's: spilled registers, semaphores, its own buffers

    def size(dh: Accumulation, block: int | None = None) -> Plan:
        sized = _sized(tokens, width, itemsize, chip, gradients, dh, sub, block)
        return dataclasses.replace(sized, vmem_limit=limit)

    if not gradients:
        candidates = (
            [size("blocks", block)] if block else [size("resident"), size("blocks", _fitting_block(size, budget))]
        )
    elif block is not None or dh == "blocks":
        candidates = [size("blocks", block or _fitting_block(size, budget))]
    elif dh is not None:
        candidates = [size(dh)]
    else:
        # Read-modify-write costs the same traffic as one more block where a block holds as many tokens as V has items
        # in a tile times the tiles; it stays behind the arithmetic on every chip, so it comes before blocks.
        candidates = [size("resident"), size("hbm"), size("blocks", _fitting_block(size, budget))]
    for candidate in candidates:
        if candidate.vmem_bytes <= budget and not (candidate.dh == "hbm" and candidate.block == candidate.tokens):
            return candidate
    asked = candidates[-1]
    raise ValueError(
        f"a tile of {asked.items} items x {asked.tokens} tokens at width {width} with dh {asked.dh} needs "
        f"{asked.vmem_bytes / _MIB:.1f} MiB of VMEM, {chip.name} has {budget / _MIB:.1f} to give: "
        f"{_remedy(size, budget, asked)}"
    )


def _sub_tile(tokens, items, chip, tile, token_tile):
    """(items, tokens, sub_items, sub_tokens) of a tile."""
    # A wider MXU fills with half the tokens; then more items a sub-tile amortise its pipeline better.
    sub_items, sub_tokens = (512, 256) if chip.mxu_width == 256 else (256, 512)
    token_tile = min(_round_up(token_tile or 512, _LANES), _round_up(tokens, _LANES))
    sub_tokens = max(n for n in (_LANES, 256, 512) if n <= sub_tokens and token_tile % n == 0)
    most_items = _UNROLLED // token_tile if tile is None else tile
    tile_items = _round_up(min(most_items, items, 2048 if tile is None else tile), _LANES)
    sub_items = max(n for n in (_LANES, 256, 512) if n <= sub_items and tile_items % n == 0)
    return tile_items, token_tile, sub_items, sub_tokens


def _sized(tokens, width, itemsize, chip, gradients, dh, sub, block) -> Plan:
    tile_items, tile_tokens, sub_items, sub_tokens = sub
    total = _round_up(tokens, tile_tokens)
    block = min(_round_up(block or total, tile_tokens), total) if dh == "blocks" else total
    lanes, rows = _round_up(width, _LANES), _round_up(width, 16)
    table_tile = tile_items * lanes
    # Blocks that the pipeline double-buffers, then what is allocated once.
    need = 2 * (table_tile * itemsize + rows * tile_tokens * itemsize + 8 * tile_items * 4 + 8 * tile_tokens * 4)
    need += table_tile * itemsize + tile_items * _LANES * 4 + 2 * 8 * block * 4
    if gradients:
        need += 2 * (table_tile * 4 + tile_tokens * lanes * itemsize + 8 * tile_items * 4)
        need += rows * tile_items * itemsize + tile_items * _LANES * 4
        need += 2 * table_tile * 4 if dh == "blocks" and block < total else 0
        need += rows * 4 * (2 * tile_tokens if dh == "hbm" else block)
    return Plan(chip.name, dh, tile_items, tile_tokens, sub_items, sub_tokens, block, -(-total // block), need, 0)


def _fitting_block(size, budget: int) -> int:
    """The largest block, of equal ones, that fits; one T tile if none does."""
    whole = size("blocks")
    for blocks in range(1, whole.block // whole.tokens + 1):
        block = _round_up(-(-whole.block // blocks), whole.tokens)
        if size("blocks", block).vmem_bytes <= budget:
            return block
    return whole.tokens


def _remedy(size, budget, asked: Plan) -> str:
    others: tuple[Accumulation, ...] = ("hbm", "blocks")
    for dh in others:
        fits = size(dh, _fitting_block(size, budget)) if dh == "blocks" else size(dh)
        if fits.vmem_bytes <= budget and fits.dh != asked.dh:
            return f"dh={dh!r} would fit ({fits})"
    return "a smaller tile would fit, or implementation='xla'"


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
