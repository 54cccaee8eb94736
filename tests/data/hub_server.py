"""A small Hugging Face Hub on this machine: what huggingface_hub's client asks of one to download a data set's files.

Two servers, because the client tells the hub from its CDN by the origin: the hub answers HEAD and GET of
/datasets/REPO/resolve/REVISION/PATH with the file's commit, etag (its sha256) and size and a redirect; the CDN serves
the bytes, whole or a range.
"""

import contextlib
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple

from tests.local_server import running

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = re.compile(r"/datasets/yandex/yambda/resolve/([^/]+)/(.+)")


class Request(NamedTuple):
    server: str  # "hub" or "cdn"
    method: str
    path: str
    range: str | None
    authorization: str | None


class Hub:
    """The served files and what is wrong with them; everything may be changed between two requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # by path inside the repository
        self.announced: dict[str, tuple[str, int]] = {}  # path -> another (etag, size) than the file's own
        self.sent: dict[str, bytes] = {}  # path -> other bytes than the file's own
        self.drop_after: dict[str, int] = {}  # path -> bytes after which one connection breaks
        self.stall_after: dict[str, int] = {}  # path -> bytes after which one connection waits for ``awake``
        self.awake = threading.Event()
        self.refusals: list[int] = []  # statuses of the next requests to the hub
        self.tokens: dict[str, str] = {}  # path -> the token it needs
        self.requests: list[Request] = []

    def etag_and_size(self, path: str) -> tuple[str, int]:
        content = self.files[path]
        return self.announced.get(path, (hashlib.sha256(content).hexdigest(), len(content)))

    def gets(self, path: str) -> list[Request]:
        """The downloads of a file that were begun."""
        return [request for request in self.requests if request.server == "cdn" and request.path == f"/{path}"]


@contextlib.contextmanager
def serve():
    """Yields (hub, its address)."""
    hub = Hub()
    with running(_Cdn, hub=hub) as cdn, running(_Hub, hub=hub, cdn=cdn) as address:
        yield hub, address


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    cdn: str
    name: str

    def record(self) -> None:
        headers = self.headers
        request = Request(self.name, self.command, self.path, headers["Range"], headers["Authorization"])
        self.hub.requests.append(request)

    def answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Hub(_Handler):
    name = "hub"

    def do_HEAD(self) -> None:
        self.record()
        hub = self.hub
        if hub.refusals:
            return self.answer(hub.refusals.pop(0), Content_Length="0")
        if not (match := RESOLVE.fullmatch(self.path)):
            return self.answer(404, X_Error_Code="RepoNotFound", Content_Length="0")
        revision, path = match.groups()
        if revision not in ("main", COMMIT):
            return self.answer(404, X_Error_Code="RevisionNotFound", Content_Length="0")
        if path not in hub.files:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT, Content_Length="0")
        if path in hub.tokens and self.headers["Authorization"] != f"Bearer {hub.tokens[path]}":
            status = 403 if self.headers["Authorization"] else 401
            return self.answer(status, X_Error_Code="GatedRepo", Content_Length="0")
        etag, size = hub.etag_and_size(path)
        return self.answer(
            302,
            X_Repo_Commit=COMMIT,
            X_Linked_Etag=f'"{etag}"',
            X_Linked_Size=str(size),
            Location=f"{self.cdn}/{path}",
            Content_Length="0",
        )

    do_GET = do_HEAD


class _Cdn(_Handler):
    name = "cdn"

    def do_GET(self) -> None:
        self.record()
        path = self.path.removeprefix("/")
        content = self.hub.sent.get(path, self.hub.files[path])
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            first = int(match[1])
            where = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.answer(206, Content_Length=str(len(content) - first), Content_Range=where)
            content = content[first:]
        else:
            self.answer(200, Content_Length=str(len(content)), Accept_Ranges="bytes")
        if (end := self.hub.stall_after.pop(path, None)) is not None:
            self.wfile.write(content[:end])
            self.hub.awake.wait()
            content = content[end:]
        if (end := self.hub.drop_after.pop(path, None)) is not None:
            content, self.close_connection = content[:end], True
        with contextlib.suppress(ConnectionError):  # the client may have gone
            self.wfile.write(content)
