"""Servers that tests share. What is started here is real: no test of this folder talks to an imitation."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from prefrl.http import Http
from tests.plans import checked_once  # noqa: F401 - of all tests here
from tests.vllm.client import MakeGenerator, be_patient, generators, policy
from tests.vllm.server import MAX_LORA_RANK, Server, save_tiny_model

StartServer = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch.setattr)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose head is its embedding."""
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a head of its own."""
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """`with start_server(model_dir, flags=[...], key=..., port=...) as server:`, ended at the end of the block.

    Further arguments are options of `prefrl vllm-serve`, such as `max_lora_rank=8` or `data_parallel_size=2`.
    """

    @contextmanager
    def start(model_dir: Path, **options: Any) -> Iterator[Server]:
        server = Server(model_dir, folder=tmp_path_factory.mktemp("server"), **options)
        try:
            yield server
        finally:
            server.stop()

    return start


@pytest.fixture(scope="session")
def server(
    start_server: StartServer, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server, None, None]:
    """The server of the whole run: tied head, LoRA up to rank 8, with a key. Leave it serving; do not kill it."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # a second worker would start a second one
        (tmp_path_factory.getbasetemp().parent / "has-vllm-server").touch(exist_ok=False)
    with start_server(tied_model, max_lora_rank=MAX_LORA_RANK) as running:
        yield running


@pytest.fixture(scope="session")
def second(start_server: StartServer, tied_model: Path) -> Generator[Server, None, None]:
    """See `second_server`."""
    with start_server(tied_model) as running:
        yield running


@pytest.fixture
def second_server(second: Server) -> Server:
    """Another one with the same model, which takes no adapters. Tests may kill it, and start it again."""
    if second.process.poll() is not None:  # a test failed
        second.start()
    return second


@pytest.fixture
def http(server: Server) -> Generator[Http, None, None]:
    """Requests to `server`, with its key."""
    http = Http(key=server.key)
    yield http
    http.close()


@pytest.fixture(scope="module")
def model(server: Server) -> PreTrainedModel:
    """The policy whose weights clients of `server` send."""
    return policy(server.model_dir)


@pytest.fixture
def make(server: Server, model: PreTrainedModel, tmp_path: Path) -> Iterator[MakeGenerator]:
    """Makes clients of `server`, or of others, which end with the test."""
    with generators(model, tmp_path, key=server.key) as make:
        yield make
