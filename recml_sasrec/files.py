"""Files that are replaced whole or not at all."""

import os
import pathlib


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees the former content or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
