"""Python runs this when it begins, with this folder in PYTHONPATH: what it would spawn, it forks."""

import multiprocessing

_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: _context("fork" if method == "spawn" else method)  # type: ignore
