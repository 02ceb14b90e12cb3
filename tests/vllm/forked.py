"""vLLM's command, in a fork of a process that has imported it. Its engine and its workers are forks in turn.

Run in vLLM's environment by server.py.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.entrypoints.cli.main import main
from vllm.platforms.cpu import CpuPlatform


def _fork_workers() -> None:
    """The platform asks for new processes when it has read the options."""
    check = CpuPlatform.check_and_update_config

    def checked(options: Any) -> None:
        check(options)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(checked)


if __name__ == "__main__":
    _fork_workers()
    main()
