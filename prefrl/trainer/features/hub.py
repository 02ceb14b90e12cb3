"""Uploads of a run's model to the Hub, which may be out of reach at any time."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from transformers.trainer_utils import HubStrategy

from prefrl import distributed
from prefrl.errors import ConfigError, HubError, reason_of
from prefrl.run.checkpoints import link_files, step_of
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Run

_log = logging.getLogger(__name__)
# What of a checkpoint is the model, its tokenizer and what describes them.
_MODEL = [
    *("*.md", "*.py", "*.jinja", "*.model", "*.tiktoken", "config.json", "generation_config.json"),
    *("training_args.json", "model*.safetensors*", "adapter_*", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab*", "merges.txt"),
]
# What of an output_dir is not: checkpoints, prompts and completions, and what only this run needs.
_NOT_MODEL = [
    *("_*", ".*", "checkpoint-*", "completions/*", "evaluations/*", "profile/*", "nan-step-*", "saved-*", "*.log"),
    *("run.json", "starts.jsonl", "metrics.jsonl", "report.html"),
]
_MODEL_PLACE = ""  # the root of the repository
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
        self._changed = threading.Condition()  # guards what follows, which uploads change when they end
        self._num_running = 0  # uploads in the background, which run one after the other
        self._todo: dict[str, Path] = {}  # the checkpoints that are noted, by their place in the repository

    @property
    def is_busy(self) -> bool:
        """Whether an upload is under way."""
        return self._num_running > 0

    def wait(self) -> None:
        """Wait for all uploads in the background."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy)

    # What a training asks for.

    def try_to_create(self, run: Run, *, token: str | None, private: bool | None) -> None:
        """Create the repository, or warn that it cannot be created now.

        Raises:
            ConfigError: The Hub refuses to create it.
        """
        try:
            self._create_for(run, token, private)
        except Exception as error:
            tell_not_created(self._name(run), error)

    def push_checkpoint(self, run: Run, checkpoint: Path) -> None:
        """Upload a checkpoint in the background, as `hub_strategy` says. If it fails, that is a warning."""
        if self._args.hub_strategy == HubStrategy.END or not distributed.is_main():
            return
        self.note(checkpoint)
        if self._args.hub_always_push or not self.is_busy:
            run.callback_handler.on_push_begin(run.args, run.state, run.control)
            self._push_noted_of(run)

    def finish(self, run: Run) -> None:
        """Wait for all uploads; what is not uploaded yet is tried once more."""
        self.wait()
        if self.noted:
            self._push_noted_of(run)
            self.wait()

    def publish(
        self,
        run: Run,
        message: str | None,
        *,
        token: str | None,
        revision: str | None,
        private: bool | None,
        now: bool,
    ) -> Any:
        """Upload the model that is saved in `output_dir`; see `push`.

        Raises:
            HubError: It cannot be uploaded.
        """
        self.wait()
        try:
            self._create_for(run, token, private)
            return self.push(self._name(run), message=message, token=token, revision=revision, now=now)
        except Exception as error:
            name, state = self._name(run), run.state
            complete = "Training is complete. " if 0 < state.max_steps <= state.global_step else ""
            raise HubError(
                f"{name} could not be pushed to the Hub: {reason_of(error)}. {complete}The model is saved in "
                f"{self._args.output_dir}. To push it: {self.command(name)}"
            ) from error

    def _name(self, run: Run) -> str:
        """The name of the repository, or the one that it will get."""
        return str(run.hub_model_id or self._args.hub_model_id or Path(self._args.output_dir).absolute().name)

    def _create_for(self, run: Run, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, if that has not been done yet."""
        if run.hub_model_id is None:
            run.hub_model_id = self.create(self._name(run), token=token, private=private)

    def _push_noted_of(self, run: Run) -> None:
        try:
            self._create_for(run)
            self.push_noted(self._name(run))
        except Exception as error:
            name = self.noted[0].name if self.noted else "a checkpoint"
            _log.warning("%s could not be pushed to the Hub; training continues: %s", name, reason_of(error))

    # Uploads.

    def create(self, repository: str, *, token: str | None, private: bool | None) -> str:
        """Create a repository, if there is none of this name; returns its full name."""
        private = self._args.hub_private_repo if private is None else private
        created = self._api.create_repo(
            repository, token=token or self._args.hub_token, private=private, exist_ok=True
        )
        return str(created.repo_id)

    def note(self, checkpoint: Path) -> None:
        """Remember to upload a checkpoint, as `hub_strategy` says."""
        places = [_MODEL_PLACE]
        if self._args.hub_strategy == HubStrategy.CHECKPOINT:
            places.append("last-checkpoint")
        elif self._args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            places.append(checkpoint.name)
        with self._changed:
            self._todo |= dict.fromkeys(places, checkpoint)

    @property
    def noted(self) -> list[Path]:
        """The checkpoints that are noted and whose upload has not begun, or has failed; the last first."""
        with self._changed:
            return _last_first(self._todo.values())

    def push_noted(self, repository: str) -> None:
        """Upload what is noted in the background. What fails is a warning, and stays noted.

        A checkpoint may be deleted meanwhile: links to its files are uploaded.
        """
        with self._changed:
            places, self._todo = self._todo, {}
        checkpoints = _last_first(places.values())
        if not self.is_busy:
            for checkpoint in checkpoints:
                shutil.rmtree(_links(checkpoint).parent, ignore_errors=True)  # left by a process that was killed
        for checkpoint in checkpoints:
            if checkpoint.is_dir():
                link_files(checkpoint, _links(checkpoint))
                *others, last = [place for place, what in places.items() if what == checkpoint]
                for place in (*others, last):
                    self._start(repository, checkpoint, place, is_last=place == last)

    def _start(self, repository: str, checkpoint: Path, place: str, *, is_last: bool) -> None:
        message = f"Training in progress, step {step_of(checkpoint.name)}"
        what: dict[str, Any] = {"allow_patterns": _MODEL}
        if place != _MODEL_PLACE:
            message, what = f"{message}, checkpoint", {"path_in_repo": place}
        upload: Future[Any] = self._upload(repository, _links(checkpoint), message, run_as_future=True, **what)
        with self._changed:
            self._num_running += 1

        def end(upload: Future[Any]) -> None:
            error = upload.exception()
            if error is not None:
                told = "%r could not be pushed to %s; training continues, and the next push tries again: %s"
                _log.warning(told, message, repository, reason_of(error))
            if is_last:
                _remove(_links(checkpoint))
            with self._changed:
                self._num_running -= 1
                if error is not None:
                    self._todo.setdefault(place, checkpoint)  # a later one may have taken its place
                self._changed.notify_all()

        upload.add_done_callback(end)

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


def tell_not_created(repository: str, error: Exception) -> None:
    """Warn that a repository could not be created.

    Raises:
        ConfigError: The Hub refuses to create it.
    """
    if is_refusal(error):
        raise ConfigError(
            f"push_to_hub=True: the Hub refuses to create the repository {repository!r}: {reason_of(error)}. Check "
            "hub_model_id, and log in (hf auth login) or set hub_token; or set push_to_hub=False."
        ) from error
    _log.warning(
        "push_to_hub=True: the repository %r cannot be created now; training continues, and the next push tries "
        "again: %s",
        repository,
        reason_of(error),
    )


def _last_first(checkpoints: Iterable[Path]) -> list[Path]:
    return sorted({*checkpoints}, key=lambda path: step_of(path.name) or 0, reverse=True)


def _links(checkpoint: Path) -> Path:
    """Where the files of a checkpoint have second names while they are uploaded."""
    return checkpoint.parent / ".pushing" / checkpoint.name


def _remove(links: Path) -> None:
    shutil.rmtree(links, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are there
        links.parent.rmdir()
