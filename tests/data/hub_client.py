"""A process that fetches: one JSON request a line on stdin, one answer a line on stdout.

huggingface_hub reads its environment when it is imported, so each environment needs a process of its own.
"""

import json
import os
import resource
import sys
import time
import traceback

from recml_sasrec.config import Config
from recml_sasrec.data import hub, loader
from recml_sasrec.data.events import DataError


def answer(kind, size, format, event, revision="", environment=None, largest_file=None, cache=""):
    os.environ.update(environment or {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, limits[1]))
    try:
        if kind == "fetch":
            return {"path": hub.fetch(size, format, event, revision)}
        config = Config()
        data = config.data
        data.source, data.cache, data.revision = "yambda", cache, revision
        data.yambda_size, data.yambda_format, data.yambda_event = size, format, event
        store = loader.open_store_of(config)
        return {"items": store.item_ids.to_numpy()[store.items].tolist(), "users": store.user_ids.to_pylist()}
    except DataError as error:
        return {"error": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for name in environment or {}:
            del os.environ[name]


for line in sys.stdin:
    begin = time.monotonic()
    try:
        result = answer(**json.loads(line))
    except Exception:
        result = {"crash": traceback.format_exc()}
    print(json.dumps(result | {"seconds": time.monotonic() - begin}), flush=True)
