"""Runs a module in several processes, as torchrun does: `ranks NUMBER MODULE ARGUMENT...`.

Imports take longer than most trainings: one process imports the module and the trainers, and forks the others.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from importlib import import_module

import torch.distributed as dist

from prefrl.registry import REGISTRY
from tests.process import leave_modules_uncollected

_PORT_DIGITS = 5


def fork(rank: int, number: int, module: str, port: int) -> int:
    """Start one of `number` processes; its id. `port` is a pipe, from which it reads where the others are met."""
    child = os.fork()
    if child != 0:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(port, _PORT_DIGITS).decode().strip()}
        # The store is that of the process that forked, as under torchrun.
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(number: int, module: str) -> int:
    """The exit code: that of the first process that failed, after which the others are ended."""
    import_module(module)
    for row in REGISTRY.values():
        row.load_trainer()
    leave_modules_uncollected()
    port, its_end = os.pipe()
    ranks = {fork(rank, number, module, port) for rank in range(number)}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # has threads, so it comes after
    os.write(its_end, f"{store.port:{_PORT_DIGITS}}".encode() * number)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    number_of_ranks, name = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.exit(main(number_of_ranks, name))
