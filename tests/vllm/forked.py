"""vLLM's command, in a fork of a process that has imported it. Its engine and its workers are forks in turn.

Run in vLLM's environment by server.py. With the argument `flags`: the flags that it knows, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm.entrypoints.cli.main import main
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser


def _fork_workers() -> None:
    """The platform asks for new processes when it has read the options."""
    check = CpuPlatform.check_and_update_config

    def checked(options: Any) -> None:
        check(options)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(checked)


def flags() -> list[str]:
    """Of `vllm serve`."""
    actions = make_arg_parser(FlexibleArgumentParser())._actions
    return [option for action in actions for option in action.option_strings]


if __name__ == "__main__":
    if sys.argv[1:] == ["flags"]:
        print(json.dumps(flags()))
    else:
        _fork_workers()
        main()
