"""Uploads of a run's model to the Hub, which may be out of reach at any time."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from transformers.trainer_utils import HubStrategy

from prefrl.printable import reason_of
from prefrl.run.links import link_files

if TYPE_CHECKING:
    from prefrl.trainer.base.config import BaseConfig

__all__ = ["Hub", "is_refusal"]

_log = logging.getLogger(__name__)
# What of a checkpoint is the model, its tokenizer and what describes them.
_MODEL = [
    *("*.md", "*.py", "*.jinja", "*.model", "*.tiktoken", "config.json", "generation_config.json"),
    *("training_args.json", "model*.safetensors*", "adapter_*", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab*", "merges.txt"),
]
# What of an output_dir is not: checkpoints, prompts and completions, and what only this run needs.
_NOT_MODEL = ["_*", ".*", "checkpoint-*", "completions/*", "profile/*", "nan-step-*", "run.json", "*.log"]
_LATER = (408, 429)  # HTTP status codes of a server that asks for another try


def is_refusal(error: Exception) -> bool:
    """Whether the Hub said no, so that another try would fail, too."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code < 500 and error.response.status_code not in _LATER
    return isinstance(error, HFValidationError | LocalTokenNotFoundError)


class Hub:
    """Uploads to the Hub. Only the main process uses it.

    Args:
        args: Options.
    """

    def __init__(self, args: BaseConfig) -> None:
        self._args = args
        self._api = HfApi()
        self._pending: Future[Any] | None = None  # the last upload in the background; they run one after the other

    @property
    def is_busy(self) -> bool:
        """Whether an upload is under way."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for all uploads in the background."""
        if self._pending is not None:
            wait([self._pending])

    def create(self, repository: str, *, token: str | None, private: bool | None) -> str:
        """Create a repository, if there is none of this name; returns its full name."""
        private = self._args.hub_private_repo if private is None else private
        created = self._api.create_repo(
            repository, token=token or self._args.hub_token, private=private, exist_ok=True
        )
        return str(created.repo_id)

    def push_checkpoint(self, repository: str, checkpoint: Path, *, message: str) -> None:
        """Upload a checkpoint in the background, as `hub_strategy` says. If it fails, that is a warning.

        The checkpoint may be deleted meanwhile: links to its files are uploaded.
        """
        links = checkpoint.parent / ".pushing" / checkpoint.name
        if not self.is_busy:
            shutil.rmtree(links.parent, ignore_errors=True)  # left by a process that was killed
        link_files(checkpoint, links)
        self._start(repository, links, message, allow_patterns=_MODEL)
        if self._args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = self._args.hub_strategy == HubStrategy.CHECKPOINT
            place = "last-checkpoint" if is_last else checkpoint.name
            self._start(repository, links, f"{message}, checkpoint", path_in_repo=place)
        assert self._pending is not None
        self._pending.add_done_callback(lambda _: _remove(links))

    def _start(self, repository: str, folder: Path, message: str, **what: Any) -> None:
        upload: Future[Any] = self._upload(repository, folder, message, run_as_future=True, **what)
        upload.add_done_callback(lambda upload: _tell_failure(upload, repository, message))
        self._pending = upload

    def push(self, repository: str, *, message: str | None, now: bool, **where: str | None) -> Any:
        """Upload the model in `output_dir`.

        Args:
            repository: Its name.
            message: Of the commit.
            now: Whether to wait until it is done.
            where: `token` and `revision`, if they are others than those of the options.

        Returns:
            HuggingFace's description of the commit; with `now=False`, a future of it.
        """
        others = {name: value for name, value in where.items() if value is not None}
        folder = Path(self._args.output_dir)
        return self._upload(repository, folder, message, run_as_future=not now, ignore_patterns=_NOT_MODEL, **others)

    def _upload(self, repository: str, folder: Path, message: str | None, **what: Any) -> Any:
        options = {"token": self._args.hub_token, "revision": self._args.hub_revision} | what
        return self._api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message, **options)

    def command(self, repository: str) -> str:
        """The command that uploads the model in `output_dir`."""
        excluded = [word for pattern in _NOT_MODEL for word in ("--exclude", pattern)]
        return shlex.join(["hf", "upload", repository, self._args.output_dir, ".", *excluded])


def _remove(links: Path) -> None:
    shutil.rmtree(links, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are there
        links.parent.rmdir()


def _tell_failure(upload: Future[Any], repository: str, message: str) -> None:
    error = upload.exception()
    if error is not None:
        _log.warning("%r could not be pushed to %s; training goes on: %s", message, repository, reason_of(error))
