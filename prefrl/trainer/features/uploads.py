"""Uploads of a run's checkpoints to a second place, `upload_to`."""

from __future__ import annotations

import logging

from prefrl import distributed
from prefrl.options.run import UploadParams
from prefrl.run.checkpoints import own_checkpoints
from prefrl.run.uploads import Place, Uploads
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run

_log = logging.getLogger(__name__)


def uploaded_checkpoints(args: BaseConfig) -> UploadedCheckpoints | None:
    """What uploads checkpoints, if the options ask for it."""
    return UploadedCheckpoints(str(args.upload_to), args.upload_params) if args.upload_to is not None else None


class UploadedCheckpoints(Part):
    """Uploads each checkpoint when it is sealed, or the last one at the end. The main process does it.

    Args:
        url: Where to.
        params: Options.
    """

    def __init__(self, url: str, params: UploadParams) -> None:
        self._url, self._params = url, params
        self._uploads: Uploads | None = None

    def opened(self, run: Run) -> None:
        """Go on with what an interrupted run has not uploaded."""
        if not distributed.is_main():
            return
        folder, everything = run.run_folder, self._params.checkpoints == "all"
        if self._uploads is None:
            self._uploads = Uploads(folder.path, Place(self._url))
        self._uploads.resume(folder.run, everything=everything)
        folder.on_sealed = self._uploads.add if everything else None

    def left(self, run: Run, is_complete: bool) -> None:
        """Wait at most `timeout` seconds for uploads; say what could not be uploaded."""
        if self._uploads is None:
            return
        path = run.run_folder.path
        own = own_checkpoints(path, run=run.run_folder.run)
        if own and is_complete:
            self._uploads.add(own[max(own)])
        failed = self._uploads.finish(self._params.timeout)
        if failed:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in sorted(failed.items()))
            _log.warning(
                "not uploaded to %s:%s\nTo upload what is still in %s, start the same training again with "
                "resume_from_checkpoint=True.",
                self._uploads.place.url,
                reasons,
                path,
            )
