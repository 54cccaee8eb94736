"""Exported models on the Hugging Face Hub: pushed and fetched by ``huggingface_hub``, faults said in one sentence.

Cache, token (``hf auth login`` or HF_TOKEN), mirror (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE) are the client's.
"""

import contextlib
import pathlib
import warnings
from collections.abc import Iterator

from recml_sasrec import serving
from recml_sasrec.config import ConfigError
from recml_sasrec.data.events import DataError

SCHEME = "hf://"
FILES = (serving.ABOUT, serving.ENCODER, serving.ITEMS, serving.TENSORS)  # of an exported model, to serve it


def check_name(name: str, flag: str) -> None:
    """Raises ConfigError where the hub can have no repository of this name."""
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        valid = name.count("/") == 1
    except errors.HFValidationError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{flag} {name} is no name of a repository; write user/name, each of letters, digits, '-', '_' and '.', "
            "at most 96 together"
        )


def push(folder: pathlib.Path, name: str, private: bool) -> str:
    """Uploads an exported folder to a model repository, made where it doesn't exist, as one commit; returns its URL.

    Raises:
        DataError: no network, no token, or no access.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    again = f"then push the complete folder with --workdir {folder} --push {name}"
    with _told(f"{folder} can't be pushed to {name!r}", again), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "It seems that you are about to commit a data file")  # the items' ids
        url = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, ignore_patterns=[".*"], commit_message="Upload an exported SASRec model"
        )
    return str(url)


def local_folder(path: str | pathlib.Path) -> pathlib.Path:
    """The folder that a path names; for ``hf://user/name[@revision]`` the cached copy, fetched where the hub has newer.

    Raises:
        ConfigError: a name that no repository can have.
        DataError: no such repository or revision, no access, or neither network nor a cached copy.
    """
    text = str(path)
    if not text.startswith("hf:/"):  # pathlib takes one slash of two away
        return pathlib.Path(path)
    from huggingface_hub import snapshot_download

    name, _, revision = text.removeprefix("hf:/").lstrip("/").partition("@")
    check_name(name, SCHEME)
    source = f"{SCHEME}{name}{'@' * bool(revision)}{revision}"
    with _told(f"{source} can't be fetched", "or name a local folder"):
        folder = pathlib.Path(snapshot_download(name, revision=revision or None, allow_patterns=list(FILES)))
    if missing := [file for file in FILES if not (folder / file).is_file()]:
        raise DataError(f"{source} holds no exported model (no {', '.join(missing)}); name one that was pushed")
    return folder


@contextlib.contextmanager
def _told(what: str, otherwise: str) -> Iterator[None]:
    """Turns what the client raises into one sentence."""
    try:
        yield
    except Exception as error:
        why, remedy = _explained(error)
        raise DataError(f"{what} ({why}); {remedy}, {otherwise}") from error


def _explained(error: BaseException) -> tuple[str, str]:
    """(what happened, what to do)."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # it only says that there was no copy to fall back to
    reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200].rstrip(".: ")
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision", "name one of its branches, tags or commits"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):  # also where there is no such repository, so as not to say which private ones exist
            token = "the token that is set gives no access" if get_token() else "no token is set"
            why = f"{constants.ENDPOINT} refuses it, {status}, {token}"
            return why, "check the name, run `hf auth login` or set HF_TOKEN to a token that may"
        if status == 404:
            return f"{constants.ENDPOINT} has no such repository", "check its name and HF_ENDPOINT"
        return f"{constants.ENDPOINT} answers {status}", "try again later"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "no token is set", "run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return f"HF_HUB_OFFLINE forbids to ask {constants.ENDPOINT}", "unset that once"
    # the HTTP library is the client's choice (httpx, httpx2): its errors have the base of the client's own
    if isinstance(error, errors.HfHubHTTPError.__bases__[0]):
        return f"{constants.ENDPOINT} can't be reached, {reason}", "connect, or set HF_ENDPOINT to a mirror"
    return reason, "start again"
