"""Where arrays live: one mesh axis over all devices, rows of a batch split over it, the state replicated."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recml_sasrec.config import ConfigError


def make_mesh() -> Mesh:
    """A mesh with the axis ``data`` over all devices."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Rows of a batch over the devices.

    Raises:
        ConfigError: the rows don't divide among the devices.
    """
    if batch_size % mesh.size:
        raise ConfigError(
            f"config.train.batch_size={batch_size} is not a multiple of the {mesh.size} devices; "
            f"the nearest is {max(1, round(batch_size / mesh.size)) * mesh.size}"
        )
    return NamedSharding(mesh, PartitionSpec("data"))
