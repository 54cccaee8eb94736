"""Where arrays live: a mesh of ``data`` x ``items``, the item table and all that has its rows split over ``items``.

Rows of a batch are split over both axes where they divide, so that no device repeats another's work; what is not named
here is replicated. The numbers of a run are the same on any mesh, up to the rounding of sums.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recml_sasrec import heads
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.heads.placement import DATA, ITEMS

log = logging.getLogger("recml_sasrec")

# Leaves of the state, params and moments alike, with one of these names on their path and a row an item are split.
BY_ITEM = ("item_table", "item_bias", "item_content", "item_warm")


@dataclass(frozen=True)
class Layout:
    """A run's mesh and what lies where on it."""

    mesh: Mesh
    num_items: int  # V
    placement: heads.Placement | None  # of the head's arguments; None on one device

    @property
    def table_rows(self) -> int:
        """V rounded up to the ``items`` axis; the rows beyond V are no items."""
        shards = self.mesh.shape[ITEMS]
        return -(-self.num_items // shards) * shards

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def rows(self) -> NamedSharding:
        """Of the arrays of a batch."""
        return NamedSharding(self.mesh, P(self.placement.tokens) if self.placement else P())

    def of(self, tree: Any) -> Any:
        """The sharding of each leaf of a state, or of a part of it that starts at a name."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, self._spec(path, leaf)), tree
        )

    def _spec(self, path: tuple, leaf: Any) -> P:
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        by_item = names.intersection(BY_ITEM) and leaf.shape[:1] == (self.table_rows,)
        return P(ITEMS, *[None] * (leaf.ndim - 1)) if by_item else P()

    def put_rows(self, rows_VX: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """An array with a row an item on the devices, followed by zeros up to the rows of the table.

        A process reads only the rows of its own devices: the array may be mapped from a file.
        """

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.table_rows)
            own = np.asarray(rows_VX[start:stop])
            return np.pad(own, [(0, stop - start - len(own)), *[(0, 0)] * (own.ndim - 1)])

        return jax.make_array_from_callback((self.table_rows, *rows_VX.shape[1:]), sharding, part)

    def of_rows(self, rows: int) -> "Layout":
        """The same for batches of so many rows, which may not divide among the devices."""
        return self if self.placement is None else replace(self, placement=self.placement.for_rows(rows))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Of what is split over groups of devices, but not inside them."""
        return tuple(axis for axis in self.placement.tokens if axis == DATA) if self.placement else ()

    def lookup(self, table_VD: jax.Array, ids: jax.Array) -> jax.Array:
        """[..., D] rows of the item table."""
        return heads.lookup(table_VD, ids, self.placement)


def make_layout(config: Config, num_items: int, topology: Sequence[jax.Device] | None = None) -> Layout:
    """The layout of ``config.mesh`` over all devices, or over those of a topology to compile for.

    Raises:
        ConfigError: a mesh that does not multiply to the devices, or rows that don't divide among them.
    """
    devices = jax.device_count() if topology is None else len(topology)
    rows = config.train.batch_size // config.train.accumulate
    tokens = rows * config.data.length
    data, items = config.mesh.data, config.mesh.items
    chosen = not data and not items
    if chosen:
        items = devices if rows % devices or _prefers_shards(num_items, tokens) else 1
    for name, size in (("data", data), ("items", items)):
        if size and not (data and items) and devices % size:
            near = min((n for n in range(1, devices + 1) if devices % n == 0), key=lambda n: abs(n - size))
            raise ConfigError(
                f"config.mesh.{name}={size} does not divide the {devices} devices; the nearest number that does is "
                f"{near}, and 0 lets it be chosen"
            )
    data, items = data or max(devices // items, 1), items or max(devices // max(data, 1), 1)
    if data * items != devices:
        raise ConfigError(
            f"config.mesh.data={data} times config.mesh.items={items} is {data * items}, but there are {devices} "
            f"devices; let both be 0 to have them chosen, or one of them for what the other leaves"
        )
    mesh = jax.make_mesh((data, items), (DATA, ITEMS), axis_types=(AxisType.Auto,) * 2, devices=topology)
    if devices == 1:
        return Layout(mesh, num_items, None)
    if rows % data:
        raise ConfigError(
            f"config.train.batch_size={config.train.batch_size}, in {config.train.accumulate} parts, is not a multiple "
            f"of the {data} devices of config.mesh.data; the nearest is "
            f"{max(1, round(rows / data)) * data * config.train.accumulate}"
        )
    placement = heads.Placement(mesh).for_rows(rows)
    placement = placement._replace(gather=_gathers(num_items, tokens // data, placement.tokens))
    log.info(
        "mesh: %d data x %d items%s; %s of a step's positions",
        data, items, " (chosen)" if chosen else "",
        "the head gathers the table, smaller than the hidden states" if placement.gather == "table"
        else "the head gathers the hidden states, smaller than the table",
    )  # fmt: skip
    return Layout(mesh, num_items, placement)


def block_of_process(sharding: NamedSharding, rows: int) -> tuple[int, int]:
    """(index, count): of ``rows`` cut into ``count`` equal blocks, the one on this process's devices; else all."""
    indices = sharding.addressable_devices_indices_map((rows,)).values()
    parts = sorted({index[0].indices(rows)[:2] for index in indices if index is not None})
    size = sum(end - start for start, end in parts)
    whole = parts[-1][1] - parts[0][0] == size and rows % size == 0 and parts[0][0] % size == 0
    return (parts[0][0] // size, rows // size) if whole else (0, 1)


def _prefers_shards(num_items: int, tokens: int) -> bool:
    """Whether splitting the table moves fewer bytes a step than reducing its gradient over copies of it.

    Copies: 2 V D numbers (an all-reduce). Shards: 4 T D, hidden states and looked-up rows, there and back.
    """
    return 2 * num_items > 4 * tokens


def _gathers(num_items: int, group_tokens: int, axes: tuple[str, ...]) -> Literal["hidden", "table"]:
    """What moves fewer bytes in the head: hidden states and their gradient, or the table and its own."""
    return "table" if ITEMS in axes and num_items < group_tokens else "hidden"
