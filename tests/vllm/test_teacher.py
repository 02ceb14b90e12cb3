"""A teacher on a real server is the teacher of the same weights in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.vllm.teacher import TeacherServers
from prefrl.http import Http
from prefrl.models.export import PolicyWeights
from prefrl.options.distillation import TeacherServerParams
from prefrl.types import TokenBatch
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer
from tests.patience import PATIENCE
from tests.vllm.client import MakeGenerator
from tests.vllm.server import MAX_MODEL_LEN, Server

pytestmark = pytest.mark.vllm

VOCAB_SIZE = 128


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)


@pytest.fixture
def teacher(server: Server, model: PreTrainedModel, make: MakeGenerator) -> PreTrainedModel:
    """The model that the server serves."""
    make([server.url]).sync(PolicyWeights(model), version=1)
    return model


def rows(lengths: list[tuple[int, int]]) -> TokenBatch:
    """Random tokens: each row has as many in its prompt and in its response as its pair says."""
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, VOCAB_SIZE, (sum(pair),), generator=random) for pair in lengths]
    prompts, responses = zip(*(text.split(pair) for text, pair in zip(texts, lengths, strict=True)), strict=True)
    return TokenBatch(
        prompt_ids=torch.cat(prompts),
        prompt_lengths=tuple(map(len, prompts)),
        prompt_index=tuple(range(len(lengths))),
        response_ids=torch.cat(responses),
        response_lengths=tuple(map(len, responses)),
        trainable=torch.ones(sum(map(len, responses)), dtype=torch.bool),
        group_index=tuple(range(len(lengths))),
    )


def test_served_log_probs_are_those_of_the_model_whatever_its_server_computes_beside_them(
    server: Server, teacher: PreTrainedModel
) -> None:
    batch = rows([(3, 9), (40, 30), (1, 1), (7, 120), *[(5, 8)] * 4])
    with torch.no_grad():
        whole = [teacher(text[None]).logits[0].log_softmax(1) for text in batch.texts]
    lengths = batch.response_lengths
    expected = torch.cat([one[-length - 1 : -1] for one, length in zip(whole, lengths, strict=True)]).topk(5, dim=1)
    http = Http(key=server.key)
    servers = TeacherServers([server.url], TeacherServerParams(top_k=5), vocab_size=VOCAB_SIZE, http=http)
    try:
        servers.recover()
        top = servers.top_logprobs(batch)
        assert torch.equal(top.ids, expected.indices.int())
        torch.testing.assert_close(top.logprobs, expected.values, atol=1e-4, rtol=0)
        assert servers.longest_text == MAX_MODEL_LEN - 1
        servers.top_logprobs(rows([(1, MAX_MODEL_LEN - 2)]))
        with pytest.raises(GenerationError, match=r"takes texts of at most 255 tokens, and this one has 256\."):
            servers.top_logprobs(rows([(1, MAX_MODEL_LEN - 1)]))
    finally:
        servers.close()


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 1.0},
        {"beta": 0.0, "on_policy_fraction": 0.0, "num_generations": 1, "train_dataset": dataset_of("sft")},
    ],
    ids=["on_policy", "given"],
)
def test_a_student_learns_the_same_from_a_served_teacher_and_from_one_here(
    options: dict[str, Any], tmp_path: Path, server: Server, teacher: PreTrainedModel
) -> None:
    served = {
        "teacher_model": None,
        "teacher_server_base_url": server.url,
        "teacher_server_kwargs": {"top_k": VOCAB_SIZE, "server_timeout": PATIENCE},
    }
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(server.model_dir)
    weights, losses = [], []
    for where in ({"teacher_model": teacher}, served):
        student = tiny_model("qwen2", seed=3)
        trainer = make_trainer(
            "distillation", tmp_path, model=student, processing_class=tokenizer, max_steps=2, **options, **where
        )
        trainer.train()
        trainer.close()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in student.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=0)


def test_a_student_whose_tokenizer_splits_prompts_in_another_way_is_refused(tmp_path: Path, server: Server) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer of '.*' at http.* makes \[62, 79, 72, 91, 80"):
        make_trainer(
            "distillation",
            tmp_path,
            model=tiny_model("qwen2"),
            processing_class=tiny_tokenizer(),
            teacher_model=None,
            teacher_server_base_url=server.url,
        )
