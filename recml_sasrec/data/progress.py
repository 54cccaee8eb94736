"""How far the reading of a source is: a bar on a terminal, a line every few seconds elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from recml_sasrec.data.events import EventBatch

log = logging.getLogger("recml_sasrec")
EVERY = 5.0  # seconds between two lines


def watched(batches: Iterator[EventBatch], doing: str) -> Iterator[EventBatch]:
    """Passes the batches on and tells events read, their rate and the share of the source; silent while short."""
    begin = told = time.monotonic()
    events = 0
    quiet = not sys.stderr.isatty()
    with tqdm(desc=doing, unit=" events", unit_scale=True, disable=quiet, delay=1, leave=False) as bar:
        for batch in batches:
            yield batch
            events += len(batch.user)
            if batch.share:
                bar.total = round(events / batch.share)
            bar.update(len(batch.user))
            now = time.monotonic()
            if quiet and now - told >= EVERY:
                told = now
                share = f" ({batch.share:.0%})" if batch.share else ""
                log.info("%s: %s events%s, %s events/s", doing, f"{events:,}", share, f"{events / (now - begin):,.0f}")
