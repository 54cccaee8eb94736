"""What a compiled step needs and what the device has, compared before training starts."""

import os
import pathlib
from typing import Any

import jax


class MemoryLimitError(ValueError):
    """A step that can't fit its device; the message is one sentence for the user."""


def describe(compiled: jax.stages.Compiled) -> tuple[int, str]:
    """Bytes that a compiled step needs on a device, and the same in words."""
    stats: Any = compiled.memory_analysis()
    # donated arguments share their buffers with the outputs
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    needed = held + stats.temp_size_in_bytes
    return (
        needed,
        f"{size(needed)} (state and batch {size(held)}, temporaries {size(stats.temp_size_in_bytes)})",
    )


def check_fits(needed: int, words: str, limit: int | None, head: str) -> None:
    """Raises:
    MemoryLimitError: the step needs more than the device has.
    """
    if limit is not None and needed > limit:
        remedy = "lower config.train.batch_size or config.model.width, or raise config.train.accumulate"
        if head == "dense_bce":
            remedy = "set config.head.name=cut_bce, which makes no logits, or lower config.train.batch_size"
        raise MemoryLimitError(f"a training step needs {words}, but the device has {size(limit)}; {remedy}")


def device_limit(device: jax.Device) -> int | None:
    """Bytes of memory that the device can use, None where unknown; for a CPU the machine's or the container's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats.get("bytes_limit")
    if device.platform != "cpu":
        return None
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = pathlib.Path(name)
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def size(number: int) -> str:
    """A number of bytes for people."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**28 else f"{number / 2**20:.1f} MiB"
