"""Options of the test run."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Generator
from typing import Any, TypeVar

import pytest

from tests.process import leave_modules_uncollected

# While modules are imported, there is no garbage, but much to look through.
gc.disable()

# Before transformers is imported: no test asks the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before datasets is imported: nothing that an earlier run left in the cache is read.
_CACHE = tempfile.TemporaryDirectory(prefix="prefrl-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name
os.environ["XDG_CONFIG_HOME"] = _CACHE.name  # the key of this user's servers is none of the tests'

with contextlib.suppress(ImportError):  # `make gpu` runs where it may be missing
    from hypothesis import settings

    # How long an example takes is the machine's matter: others work on it, too.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

# What takes longest is given out first, so that no worker is left alone with it at the end.
_FIRST = ("tests/vllm/", "tests/distributed/", "tests/contract/", "tests/cli/")
# What starts servers as users do, afresh: a second worker runs it beside the one that has the server of the whole run.
_AFRESH = "tests/vllm/test_serve.py"
# Files whose tests share what was trained or computed.
_SHARING = (
    "tests/distributed/",
    "tests/golden/",
    "tests/property/",
    "tests/unit/",
    "tests/contract/test_learning.py",
    "tests/contract/test_memory.py",
    "tests/contract/test_options.py",
    "tests/contract/test_same_update.py",
)

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test is a failed test")
    if importlib.util.find_spec("pytest_timeout") is None:  # as above; pyproject.toml's options must still be known
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "needs pytest-timeout")


# Modules that are left out of garbage collection, and how many more there may be until they are, too.
_num_frozen = 0
_MANY = 100


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which xdist gives tests out, without its own: it would begin with the largest number of tests."""
    places = {folder: place for place, folder in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get("/".join(item.nodeid.split("/")[:2]) + "/", len(places)))


def pytest_collection_finish() -> None:
    _freeze_modules()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """The first training imports hundreds of modules, and what a file leaves in caches stays there."""
    yield
    if len(sys.modules) > _num_frozen + _MANY or nextitem is None or nextitem.path != item.path:
        _freeze_modules()


def _freeze_modules() -> None:
    global _num_frozen
    gc.enable()
    leave_modules_uncollected()
    _num_frozen = len(sys.modules)


@pytest.hookimpl(optionalhook=True)  # xdist may be missing
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that share vLLM servers, and one those that start servers afresh; they begin first.

    One also runs all tests of a file that share what was trained, in tests/distributed by several processes, and all
    short tests of a file, so that what its fixtures make is made once.
    `--dist loadgroup` would say the same with less, but pytest-xdist 3.8 groups nothing under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class OneWorkerForWhatIsShared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/vllm/"):
                return "servers afresh" if nodeid.startswith(_AFRESH) else "shared servers"
            return nodeid.partition("::")[0] if nodeid.startswith(_SHARING) else nodeid

        def remove_node(self, node: Any) -> str | None:
            """A test that ended its worker has failed. xdist would run it again, which ends the next worker."""
            units = self.assigned_work[node]
            ended = next((test for tests in units.values() for test, is_over in tests.items() if not is_over), None)
            if ended is None:
                return super().remove_node(node)
            del self.assigned_work[node]
            for scope, tests in units.items():
                left = tests | {ended: True} if ended in tests else tests
                if not all(left.values()):
                    self.workqueue[scope] = left
            for other in self.assigned_work:
                self._reschedule(other)
            return ended

        def _reschedule(self, node: Any) -> None:
            """A worker begins a test when it knows the next one, or that there is none: so it gets two, or the end."""
            super()._reschedule(node)
            if self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return OneWorkerForWhatIsShared(config, log)


_is_nice = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """The tests with vLLM servers take longest, so the others let them go first."""
    global _is_nice
    if not _is_nice and "PYTEST_XDIST_WORKER" in os.environ and not item.nodeid.startswith("tests/vllm/"):
        os.nice(5)
        _is_nice = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """After some errors of an earlier test a process can use its device no more: xdist starts another one then."""
    if item.get_closest_marker("gpu") is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _forbid_skip(item.config, report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _forbid_skip(collector.config, report)


def _forbid_skip(config: pytest.Config, report: Report) -> Report:
    if config.getoption("--forbid-skips") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, but --forbid-skips is on: {reason}"
    return report
