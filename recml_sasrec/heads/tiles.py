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
# (items, tokens) of a tile, best first. A step's sub-tiles are unrolled: a wider tile spreads what a step costs at its
# ends, but 2**21 logits are all a program should hold.
_TILES = ((2048, 1024), (2048, 512), (1024, 512), (512, 256), (256, 128), (128, 128))


@dataclass(frozen=True)
class Chip:
    """What tile sizes depend on, per core."""

    name: str
    vmem_bytes: int
    mxu_width: int
    packed: bool  # its vector unit computes in bfloat16, two values a lane
    cores: int  # that share a JAX device and its memory; the items are split among them


CHIPS = {
    "v4": Chip("v4", 16 * _MIB, 128, False, 2),
    "v5e": Chip("v5e", 128 * _MIB, 128, False, 1),
    "v5p": Chip("v5p", 64 * _MIB, 128, False, 2),
    "v6e": Chip("v6e", 128 * _MIB, 256, True, 1),
    "7x": Chip("7x", 64 * _MIB, 256, True, 1),
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
    return Chip(name, info.vmem_capacity_bytes, info.mxu_column_size, info.generation >= 6, info.num_cores)


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
    packed: bool  # bfloat16 arithmetic where it is exact
    cores: int  # each sweeps its share of the V tiles for all tokens, with a dh of its own
    mxu_width: int
    vmem_bytes: int  # what the kernel is counted to need
    vmem_limit: int  # what the compiler is allowed, its own scratch included

    def __str__(self) -> str:
        cores = f"{self.cores} cores, " if self.cores > 1 else ""
        calls = f"{self.blocks} blocks of {self.block} tokens" if self.blocks > 1 else f"{self.block} tokens"
        return (
            f"{self.chip}: {cores}{calls}, tile {self.items} items x {self.tokens} tokens by {self.sub_items} x "
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
    ranks: bool = False,
    tile: int | None = None,
    token_tile: int | None = None,
    dh: Accumulation | None = None,
    block: int | None = None,
) -> Plan:
    """Chooses sizes for [tokens, items] logits of a width, ``itemsize`` bytes an element of hidden and table.

    Args:
      gradients: False for the forward-only kernel, which accumulates no dh.
      ranks: True for a second count a token.
      tile, token_tile: override the items or tokens of a tile; rounded up to what the hardware can address.
      dh: override where dh is accumulated.
      block: override the tokens of a block; implies ``dh="blocks"`` where it is less than all tokens.

    Raises:
      ValueError: what was asked for does not fit the chip's VMEM; names what would.
    """
    limit = chip.vmem_bytes * 7 // 8
    budget = limit * 3 // 4  # the rest is the compiler's: spilled registers, semaphores, its own buffers
    if block is not None:
        dh = "blocks"
    # Read-modify-write of dh stays behind the arithmetic on every chip, and blocks would read the table once more each.
    ways: tuple[Accumulation, ...] = (
        (dh,) if dh else ("resident", "hbm", "blocks") if gradients else ("resident", "blocks")
    )
    sizes = _TILES if tile is None and token_tile is None else _TILES[:1]
    for default_items, default_tokens in sizes:
        sub = _sub_tile(tokens, items, chip, tile or default_items, token_tile or default_tokens)
        for way in ways:

            def size(block: int | None, way=way, sub=sub) -> Plan:
                return _sized(tokens, width, itemsize, chip, gradients, ranks, way, sub, block)

            plan = size(block or _fitting_block(size, budget)) if way == "blocks" else size(None)
            # Reading a part of dh that the step before still writes: one T tile has to be resident.
            if plan.vmem_bytes <= budget and not (way == "hbm" and plan.block == plan.tokens):
                return dataclasses.replace(plan, vmem_limit=limit)
    raise ValueError(
        f"a tile of {plan.items} items x {plan.tokens} tokens at width {width}, dh {plan.dh}, needs "
        f"{plan.vmem_bytes / _MIB:.1f} MiB of VMEM and {chip.name} has {budget / _MIB:.1f} to give; "
        f"{_remedy(tokens, items, width, itemsize, chip, gradients, ranks, (tile, token_tile, dh, block))}"
    )


def _remedy(tokens, items, width, itemsize, chip, gradients, ranks, overrides) -> str:
    if any(override is not None for override in overrides):
        try:
            fits = plan(tokens, items, width, itemsize, chip, gradients=gradients, ranks=ranks)
            return f"without overrides this would fit: {fits}"
        except ValueError:
            pass
    return "no tile of this width fits; implementation='xla' does"


def _sub_tile(tokens, items, chip, tile, token_tile):
    """(items, tokens, sub_items, sub_tokens) of a tile."""
    tile_tokens = min(_round_up(token_tile, _LANES), _round_up(tokens, _LANES))
    tile_items = min(_round_up(tile, _LANES), _round_up(items, _LANES))
    # A wider matrix unit is filled by fewer tokens.
    most_tokens = 256 if chip.mxu_width == 256 else 512
    sub_tokens = max(n for n in (_LANES, 256, 512) if n <= most_tokens and tile_tokens % n == 0)
    sub_items = max(n for n in (_LANES, 256, 512) if tile_items % n == 0)
    return tile_items, tile_tokens, sub_items, sub_tokens


def _sized(tokens, width, itemsize, chip, gradients, ranks, dh, sub, block) -> Plan:
    tile_items, tile_tokens, sub_items, sub_tokens = sub
    total = _round_up(tokens, tile_tokens)
    block = min(_round_up(block or total, tile_tokens), total) if dh == "blocks" else total
    lanes, rows = _round_up(width + 1, _LANES), _round_up(width, 16) + 16  # with the bias among them
    table_tile = tile_items * lanes
    # Blocks that the pipeline double-buffers, then what is allocated once.
    need = 2 * (table_tile * itemsize + rows * tile_tokens * itemsize + 8 * tile_items * 4 + 8 * tile_tokens * 4)
    need += table_tile * itemsize + tile_items * _LANES * 4 + (2 + ranks) * 8 * block * 4
    if gradients:
        need += 2 * (table_tile * 4 + tile_tokens * lanes * itemsize + 8 * tile_items * 4)
        need += rows * tile_items * itemsize + tile_items * _LANES * 4
        need += 2 * table_tile * 4 if dh == "blocks" and block < total else 0
        need += rows * 4 * (2 * tile_tokens if dh == "hbm" else block)
    sizes = (tile_items, tile_tokens, sub_items, sub_tokens)
    return Plan(chip.name, dh, *sizes, block, -(-total // block), chip.packed, chip.cores, chip.mxu_width, need, 0)


def _fitting_block(size, budget: int) -> int:
    """The largest of equal blocks that fits; one T tile if none does."""
    whole = size(None)
    for blocks in range(1, whole.block // whole.tokens + 1):
        block = _round_up(-(-whole.block // blocks), whole.tokens)
        if size(block).vmem_bytes <= budget:
            return block
    return whole.tokens


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
