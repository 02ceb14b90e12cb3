"""GRPO whose completions come from a real server, with the weights of each step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefrl.data.collate import flat_batch
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.http import Http
from prefrl.rollout.journal import read_entry
from prefrl.scripts.main import main
from prefrl.trainer.online.trainer import OnlineTrainer
from tests.contract.cases import ROOT, dataset_of, make_trainer, relative_difference, update_of
from tests.launch import run_ranks
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm

PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55, 56], [60]]
# Every fifth token ends a completion, so that lengths differ.
STOP_IDS = [1, *range(10, 128, 5)]


def policy(model_dir: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = STOP_IDS
    # Not the server's: what it samples from has to come from here.
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.9)
    return model


def online(folder: Path, server: Any, **options: Any) -> OnlineTrainer:
    """A trainer that samples at `server.url`, of a model made from the one in `server.model_dir`."""
    defaults: dict[str, Any] = {
        "use_vllm": True,
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 60,
        "max_steps": 3,
        "learning_rate": 0.5,
        "beta": 0.0,
    }
    if "model" not in options:
        options["model"] = policy(server.model_dir)
    trainer = make_trainer("grpo", folder, **defaults | options)
    assert isinstance(trainer, OnlineTrainer)
    return trainer


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)


ORDERS = {"async": "in_order", "ready": "ready"}


def logged(trainer: OnlineTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_after_each_sync(trainer: OnlineTrainer) -> list[float]:
    """Make every sync compare the server with the trainer's model; returns the first log-prob after each."""
    generator = trainer.generator
    assert isinstance(generator, VLLMGenerator)
    sync: Callable[..., None] = generator.sync
    firsts: list[float] = []

    def checked(weights: Any, *, version: int) -> None:
        sync(weights, version=version)
        firsts.append(check_agreement(trainer))

    generator.sync = checked  # type: ignore[method-assign]
    return firsts


def check_agreement(trainer: OnlineTrainer) -> float:
    """Greedy tokens are equal and log-probs of samples agree; returns one of them."""
    greedy = SamplingParams(num_samples=1, max_tokens=24, temperature=0.0)
    local = LocalGenerator(trainer.policy, tokenizer=trainer.processing_class)
    seeds = [1, 2, 3]
    expected = local.generate(PROMPTS, greedy, seeds=seeds)
    found = trainer.generator.generate(PROMPTS, greedy, seeds=seeds)
    for one, other in zip(found, expected, strict=True):
        assert (one[0].token_ids, one[0].finish_reason) == (other[0].token_ids, other[0].finish_reason)
    sampling = replace(trainer.args.sampling_params(), num_samples=2, max_tokens=24)
    groups = trainer.generator.generate(PROMPTS, sampling, seeds=seeds)
    rows = [(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group]
    batch = flat_batch([prompt for prompt, _ in rows], [sample.token_ids for _, sample in rows])
    logprobs = trainer.scorer.of_policy(batch).logprobs
    sampled = torch.tensor([value for _, sample in rows for value in sample.logprobs or []])
    torch.testing.assert_close(sampled, logprobs, atol=1e-4, rtol=0)
    return float(logprobs[0])


@pytest.mark.parametrize("method", ["gloo", "shm"])
def test_steps_with_the_weights_of_each(tmp_path: Path, server: Server, method: str) -> None:
    trainer = online(tmp_path, server, weight_sync=method)
    firsts = check_after_each_sync(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    assert len(firsts) == 3
    assert max(firsts) - min(firsts) > 1e-3  # the weights moved
    assert logged(trainer, "sample/staleness_max") == [0] * 3
    # Both sides score the same distribution: the correction has nothing to correct.
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert all(seconds > 0 for seconds in logged(trainer, "time/weight_sync_s"))
    size = sum(tensor.nbytes for _, tensor in trainer.weights)
    assert all(size <= sent < 1.1 * size for sent in logged(trainer, "weights/bytes_sent"))
    trainer.generator.close()


@pytest.mark.parametrize(
    "cuts", [{"top_k": 50, "top_p": 0.9}, {"min_p": 0.2}, {"repetition_penalty": 1.3}], ids=lambda cuts: "_".join(cuts)
)
def test_the_trainer_scores_what_truncated_sampling_draws_from(
    tmp_path: Path, server: Server, cuts: dict[str, float]
) -> None:
    model = policy(server.model_dir)
    with torch.no_grad():  # so that there are unlikely tokens
        model.get_input_embeddings().weight.mul_(3)
    trainer = online(tmp_path, server, model=model, max_steps=2, learning_rate=0.1, **cuts)
    firsts = check_after_each_sync(trainer)
    trainer.train()
    assert len(firsts) == 2
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "sampling/clipped_share") == [0, 0]
    trainer.generator.close()


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], **options)


@pytest.mark.parametrize("method", ["adapter", "gloo"])
def test_steps_of_an_adapter_alone_or_merged(tmp_path: Path, server: Server, method: str) -> None:
    # With larger steps weights grow until rounding alone is a difference of more than 1e-4.
    trainer = online(tmp_path, server, weight_sync=method, peft_config=lora(), learning_rate=2.0, max_steps=4)
    firsts = check_after_each_sync(trainer)
    trainer.train()
    assert len(firsts) == 4
    assert max(firsts) - min(firsts) > 1e-3
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    trainer.generator.close()


def test_an_adapter_goes_alone_unless_told_otherwise(tmp_path: Path, server: Server) -> None:
    trainer = online(tmp_path, server, peft_config=lora(), max_steps=2, learning_rate=5.0)
    trainer.train()
    assert isinstance(trainer.generator, VLLMGenerator)
    adapter = sum(p.numel() * 4 for p in trainer.policy.parameters() if p.requires_grad)
    assert trainer.generator.weight_sync.bytes_sent < 2 * adapter
    trainer.generator.close()


def test_the_example_config_trains(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8, encoding="utf-8")
    options = ["--model_name_or_path", str(server.model_dir), "--vllm_server_base_url", server.url]
    options += ["--max_completion_length", "32", "--max_steps", "2", "--use_cpu", "--output_dir", "out"]
    assert main(["grpo", "--config", str(ROOT / "examples/grpo_vllm.yaml"), *options]) == 0
    assert Path("out/model.safetensors").exists()


def test_a_second_training_starts_with_its_own_weights(tmp_path: Path, server: Server) -> None:
    """Steps are counted from 0 again, and the weights of step 0 are others."""
    trainer = online(tmp_path, server, max_steps=1)
    trainer.train()
    firsts = check_after_each_sync(trainer)
    trainer.train()
    assert len(firsts) == 1
    trainer.generator.close()


def test_evaluation_samples_with_the_weights_as_they_are(tmp_path: Path, server: Server) -> None:
    questions = dataset_of("grpo", 5)
    trainer = online(tmp_path, server, max_steps=2, eval_strategy="steps", eval_steps=1, eval_dataset=questions)
    firsts = check_after_each_sync(trainer)
    trainer.train()
    with torch.no_grad():
        trainer.policy.get_input_embeddings().weight.mul_(0.9)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_reward"]
    # Step, evaluation, step, evaluation, and the evaluation that was asked for.
    assert len(firsts) == 5
    assert firsts[-1] != firsts[-2]
    trainer.generator.close()


@pytest.mark.parametrize("mode", ["overlap", "async", "ready"])
def test_other_modes_train_through_the_server(tmp_path: Path, server: Server, mode: str) -> None:
    options: dict[str, Any] = {"generation_mode": "overlap" if mode == "overlap" else "async", "max_steps": 4}
    options |= {} if mode == "overlap" else {"max_staleness": 2, "async_kwargs": {"order": ORDERS[mode]}}
    trainer = online(tmp_path, server, **options)
    trainer.train()
    assert trainer.state.global_step == 4
    if mode == "ready":
        assert max(logged(trainer, "sample/staleness_max")) <= 2
        entries = [read_entry(path) for path in (tmp_path / "completions").iterdir()]
        learned = [ticket for entry in entries for ticket in entry.parts[0].tickets]
        assert sorted(learned) == list(range(4 * trainer.prompts.num_prompts))
    else:
        assert logged(trainer, "sample/staleness_max") == ([0, 1, 2, 2] if mode == "async" else [0] * 4)
    check_agreement_after_sync(trainer)
    trainer.generator.close()


def check_agreement_after_sync(trainer: OnlineTrainer) -> None:
    trainer.generator.sync(trainer.weights, version=trainer.state.global_step)
    check_agreement(trainer)


def test_overlap_makes_the_update_of_sync_on_a_server(tmp_path: Path, server: Server) -> None:
    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 16}
    expected = update_of(online(tmp_path / "sync", server, **options))
    update = update_of(online(tmp_path / "overlap", server, generation_mode="overlap", **options))
    assert relative_difference(update, expected) < 1e-4


def test_two_processes_ask_for_their_own_completions(tmp_path: Path, server: Server) -> None:
    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 16}
    expected = update_of(online(tmp_path / "one", server, **options))
    result = tmp_path / "two.pt"
    job = json.dumps({"model_dir": str(server.model_dir), "url": server.url, "result": str(result)})
    run_ranks("tests.vllm.worker", job)
    assert relative_difference(torch.load(result), expected) < 1e-4


def test_an_untied_head_on_two_replicas(tmp_path: Path, untied_model: Path, start_server: Any) -> None:
    with start_server(untied_model, data_parallel_size=2, max_lora_rank=8) as replicas:
        for method in ("gloo", "shm", "adapter"):
            options: dict[str, Any] = {"peft_config": lora()} if method == "adapter" else {}
            trainer = online(tmp_path / method, replicas, weight_sync=method, max_steps=3, **options)
            firsts = check_after_each_sync(trainer)
            trainer.train()
            assert len(firsts) == 3
            trainer.generator.close()


@pytest.mark.parametrize("method", ["shm", "adapter"])
def test_a_server_on_the_device_of_training_sleeps_except_while_it_samples(
    tmp_path: Path, server: Server, http: Http, method: str
) -> None:
    """Its sleep is that of a CPU build: the engine samples nothing meanwhile, and frees nothing."""
    options: dict[str, Any] = {"learning_rate": 1.0, "max_steps": 2}
    options |= {"peft_config": lora()} if method == "adapter" else {}
    questions = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": dataset_of("grpo", 4)}
    trainer = online(tmp_path / "shared", server, vllm_mode="colocate", **options, **questions)
    assert isinstance(trainer.generator, VLLMGenerator)
    trainer.generator.sync(trainer.weights, version=0)  # as an evaluation before training
    seen: list[str] = []

    def note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            is_asleep = http.request("GET", f"{server.url}/is_sleeping", timeout=60)["is_sleeping"]
            version = http.request("GET", f"{server.url}/weight_info", timeout=60)["weight_version"]
            seen.append(f"{name}: {'asleep' if is_asleep else 'awake'} {'without weights' * (version == 'asleep')}")
            return call(*args, **kwargs)

        return noting

    trainer.loss = note("loss", trainer.loss)  # type: ignore[method-assign]
    trainer.generator.start = note("completions", trainer.generator.start)  # type: ignore[method-assign]
    firsts = check_after_each_sync(trainer)
    seen.clear()
    trainer.train()
    lacks = "without weights" * (method == "shm")
    assert set(seen) == {f"loss: asleep {lacks}", "completions: awake "}
    assert len(firsts) == 3
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    trainer.generator.close()
    # It was left asleep, and another trainer wakes it.
    other = online(tmp_path / "own", server, weight_sync=method, **options)
    other.train()
    for one, expected in zip(trainer.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(one, expected)
    other.generator.close()


def test_two_servers_share_the_prompts(tmp_path: Path, server: Server, second_server: Server) -> None:
    urls = [server.url, second_server.url]
    trainer = online(tmp_path, server, vllm_server_base_url=urls)
    firsts = check_after_each_sync(trainer)
    trainer.train()
    assert len(firsts) == 3
    for url in urls:  # each by itself
        alone = online(tmp_path / "alone", server, vllm_server_base_url=[url], model=trainer.policy)
        check_agreement_after_sync(alone)
        alone.generator.close()
    trainer.generator.close()
