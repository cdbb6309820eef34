"""Uploads an export to a Hugging Face repo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
    command_line,
)
from ckptkit.formats.detect import not_there
from ckptkit.redact import keep_secret, without_secrets
from ckptkit.storage.retry import call_with_retries
from ckptkit.storage.store import split_url


def push_folder(
    folder: str,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    show_progress: bool = True,
) -> str:
    """Upload the export in `folder` to the model repo `repo` in one commit. Return the commit's URL.

    Creates the repo if it does not exist. Files that are already on the Hub are not sent again, so an interrupted
    upload continues where it stopped. Hidden files are not uploaded. Requests that are throttled or fail temporarily
    are retried.

    Args:
        folder: A local directory with safetensors files, as written by `ckptkit convert`.
        repo: The name of the repo, such as "user/name".
        private: Whether a new repo is private; None uses the owner's setting.
        revision: The branch to commit to; None uses the repo's default branch.
        token: Access token. The default is HF_TOKEN, or the token that `hf auth login` stored.
        show_progress: Show huggingface_hub's progress bars if stderr is a terminal.

    Raises:
        UsageError: `folder` is a remote URL, or `repo` is not a repo name.
        CheckpointNotFoundError: `folder` does not exist, or contains no export.
        CorruptCheckpointError: A file of the export is missing or truncated. Nothing was sent.
        StorageError: The Hub refused the request, or could not be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if split_url(folder)[0] != "file":
        raise UsageError(f"{without_secrets(folder)}: only a local folder can be pushed. Convert to a local DST first.")
    place = Path(folder)
    if not place.exists():
        raise CheckpointNotFoundError(not_there(str(folder), str(place.absolute())))
    weights = [path for path in place.glob("*.safetensors") if path.is_file()]
    if not weights:
        raise CheckpointNotFoundError(
            f"{folder} has no .safetensors file to push. Export it first: "
            f"{command_line('convert', str(folder), 'EXPORT')} && {command_line('push', 'EXPORT', repo)}"
        )
    _check_complete(place, weights)
    keep_secret({"token": token})
    api = HfApi(token=token)
    additions = [CommitOperationAdd(name, place / name) for name in sorted(_visible(place))]
    if not show_progress:
        disable_progress_bars()
    try:
        call_with_retries(lambda: api.create_repo(repo, private=private, exist_ok=True))
        # Upload large files first, so that a retried commit does not send them again.
        call_with_retries(lambda: api.preupload_lfs_files(repo, additions, revision=revision))
        done = call_with_retries(
            lambda: api.create_commit(
                repo, additions, commit_message=f"Upload {place.name} with ckptkit", revision=revision
            )
        )
    except HFValidationError as error:
        raise UsageError(f"{repo!r} is not a repo name: {error}") from error
    except Exception as error:
        if not isinstance(error, (HfHubHTTPError, OSError)) and not _is_of_the_network(error):
            raise
        raise StorageError(None, f"pushing {folder} to {repo} failed: {without_secrets(str(error))}") from error
    return str(done.commit_url)


def _check_complete(place: Path, weights: list[Path]) -> None:
    """Raise CorruptCheckpointError if a weights file is truncated, or if a file listed in an index is missing."""
    from ckptkit.offline.verify import verify

    separate = len(weights) > 1 and not any(place.glob("*.safetensors.index.json"))  # each file is a model of its own
    for path in weights if separate else [place]:
        if problems := verify(path, quick=True).problems:
            raise CorruptCheckpointError(f"{place} was not pushed: {problems[0].message}")


def _visible(place: Path) -> Iterator[str]:
    for path in place.rglob("*"):
        name = path.relative_to(place)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()


def _is_of_the_network(error: Exception) -> bool:
    """Return whether `error` was raised by the HTTP library of the installed version of huggingface_hub."""
    roots = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(roots & {"requests", "urllib3", "httpx", "httpx2", "httpcore"})
