"""Short runs with a server: what follows a training, graders, chat APIs, and episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pyarrow.parquet as pq
import pytest

from prefrl.errors import RewardError
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.http import Http
from prefrl.rewards import LabelModel, RewardRunner, ScoreModel
from prefrl.rollout.episodes.environment import Agent
from prefrl.scripts import commands, eval, gateway, sampling
from tests.contract import episodes
from tests.contract.cases import relative_difference, update_of
from tests.patience import PATIENCE
from tests.vllm.faults import GENERATE, drop, proxy_of, second_door
from tests.vllm.server import MAX_MODEL_LEN, Server
from tests.vllm.test_training import key as key
from tests.vllm.test_training import logged, online

pytestmark = pytest.mark.vllm


def test_a_server_answers_texts_and_its_model_is_found(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    prompts, answered = tmp_path / "prompts.jsonl", tmp_path / "answered.jsonl"
    prompts.write_text('{"prompt": "1+1=", "data_source": "sums"}\n{"prompt": "2+3=", "data_source": "more"}\n')
    asking = ["--server", f"{server.url}/v1", "--dataset_name", str(prompts), "--num_generations", "2"]
    asking += ["--max_completion_length", "4"]
    assert sampling.generate([*asking, "--output_file", str(answered)]) == 0
    rows = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    assert [len(row["responses"]) for row in rows] == [2, 2]
    (tmp_path / "rewards.py").write_text("def size(completions, **_): return [len(text) for text in completions]\n")
    rewards = ["--reward_funcs", f"{tmp_path}/rewards.py:size", "--output_dir"]
    assert eval.main([*asking, *rewards, str(tmp_path / "server")]) == 0
    assert eval.main(["--dataset_name", str(answered), *rewards, str(tmp_path / "file")]) == 0
    of_server, of_file = (
        json.loads((tmp_path / name / "metrics.json").read_text(encoding="utf-8")) for name in ("server", "file")
    )
    assert of_server == of_file  # the same seeds
    assert list(of_file) == ["all", "more", "sums"]


def test_the_doctor_finds_the_server_and_its_model_and_notices_a_wrong_key(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer": "5"}\n', encoding="utf-8")
    options = ["--dataset_name", str(prompts), "--reward_funcs", "numeric_reward", "--num_generations", "4"]
    options += ["--max_completion_length", "4", "--use_cpu", "--output_dir", str(tmp_path / "run"), "--use_vllm"]
    options += ["--vllm_server_base_url", server.url]
    assert commands.doctor(["grpo", "--model_name_or_path", str(server.model_dir), *options]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert f"{server.url} serves {server.model_dir}" in found
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    assert commands.doctor(["grpo", "--model_name_or_path", str(server.model_dir), *options]) == 2
    assert "refused the request" in " ".join(capsys.readouterr().out.split())


def test_a_server_answers_chat_apis_through_the_gateway(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    options = gateway.GatewayArguments(server=f"{server.url}/v1", port=0, output_dir=str(tmp_path))
    asked: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8}
    with gateway._serving(gateway._Remote(options), options) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as api:
            ask = api.chat.completions.create
            seeded, again = (
                ask(**asked, seed=5, extra_headers={"X-Prefrl-Session": name}) for name in ("two", "three")
            )
            assert seeded.choices[0].message.content == again.choices[0].message.content
            greedy = ask(**asked, temperature=0)
            with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 2\]"):
                ask(**asked, temperature=5)
            with pytest.raises(openai.BadRequestError) as refused:
                ask(**asked | {"messages": [{"role": "user", "content": "1" * MAX_MODEL_LEN}]})
            assert refused.value.code == "context_length_exceeded"
        with anthropic.Anthropic(base_url=url, api_key="four", max_retries=0) as claude:
            answer = claude.messages.create(**asked, extra_body={"temperature": 0})
        assert "".join(block.text for block in answer.content) == (greedy.choices[0].message.content or "")
        assert answer.usage.input_tokens == greedy.usage.prompt_tokens
        assert 1 <= answer.usage.output_tokens == greedy.usage.completion_tokens <= 8
    assert len(pq.read_table(tmp_path)) == 4


def asking(server: Server, choice: list[str]) -> dict[str, Any]:
    """A random model answers what it is allowed to."""
    params = {"temperature": 0, "max_tokens": 8, "structured_outputs": {"choice": choice}}
    return {"base_url": f"{server.url}/v1", "model": str(server.model_dir), "sampling_params": params}


def test_labels_and_scores_of_a_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", server.key)
    label = LabelModel(
        input="{completion}", labels={"ok": 2, "no": -1}, api_key_env="JUDGE_KEY", **asking(server, ["ok"])
    )
    score = ScoreModel(input="{completion}", range=(0, 10), api_key_env="JUDGE_KEY", **asking(server, ["7"]))
    scores = RewardRunner([label, score], timeout=300.0).score(["a", "b"], ["c", "d"], [[1], [2]], {})
    assert scores.by_name == {"label_model": [2, 2], "score_model": [7.0, 7.0]}


def test_a_server_refuses_a_grader_without_its_key(server: Server) -> None:
    label = LabelModel(input="{completion}", labels=["ok", "no"], passing_labels=["ok"], **asking(server, ["ok"]))
    with pytest.raises(RewardError, match="401"):
        RewardRunner(label, timeout=300.0).score(["a"], ["c"], [[1]], {})


def test_overlap_makes_the_update_of_sync_and_scores_agree(tmp_path: Path, server: Server) -> None:
    options: dict[str, Any] = {"talks": "forgetful", "turn_credit": "return", "max_steps": 1, "learning_rate": 0.1}
    options |= {"per_device_train_batch_size": 16, "max_turns": 6}
    trainer = online(tmp_path / "sync", server, **options)
    expected = update_of(trainer)
    assert min(logged(trainer, "episodes/mean_turns")) > 2
    # The trainer and the server score the same ids in the same contexts.
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    update = update_of(online(tmp_path / "overlap", server, generation_mode="overlap", **options))
    assert relative_difference(update, expected) < 1e-4


@pytest.mark.parametrize(("talks", "order"), [("faithful", "in_order"), ("agent", "in_order"), ("agent", "ready")])
def test_async_episodes_train(tmp_path: Path, server: Server, talks: str, order: str) -> None:
    options: dict[str, Any] = {"talks": talks, "max_steps": 4, "generation_mode": "async", "max_staleness": 2}
    trainer = online(tmp_path, server, learning_rate=0.1, async_kwargs={"order": order}, **options)
    trainer.train()
    assert max(logged(trainer, "sample/staleness_max")) <= 2
    for sampled, trained in zip(
        *(logged(trainer, f"episodes/tokens_{end}") for end in ("sampled", "trained")), strict=True
    ):
        assert sampled == trained > 0, "something was sampled and lost"
    trainer.end()


def test_agents_ask_the_weights_of_each_step_and_wait_for_a_server_that_was_killed(
    tmp_path: Path, server: Server, http: Http
) -> None:
    """In the second step, the server is gone for a while, and comes back with other weights."""
    with proxy_of(server.url) as proxy:
        begun: list[Any] = []

        async def agent(row: Any, client: Any) -> float:
            begun.append(row)
            return await episodes.wander(row, client)

        def die(handler: Any, _: Any) -> None:
            for path, times in {"/weight_info": 1, "/health": 2}.items():  # until its client waits for it
                proxy.fail(path, drop, times=times)
            version = {"new_version": "default"}
            http.request("POST", f"{server.url}/update_weight_version", timeout=PATIENCE, json=version)
            handler.break_off()

        options: dict[str, Any] = {"talks": "agent", "environment": Agent(agent), "environment_error": "raise"}
        trainer = online(tmp_path, server, vllm_server_base_url=proxy.url, max_steps=2, learning_rate=0.1, **options)
        versions: list[set[int]] = []
        learned = trainer._learned

        def noted(rollouts: Any, **more: Any) -> Any:
            versions.append({version for rollout in rollouts for version in rollout.policy_versions})
            if not trainer.state.global_step:
                proxy.fail(GENERATE, die, times=1)
            return learned(rollouts, **more)

        trainer._learned = noted  # type: ignore[method-assign]
        trainer.train()
        assert versions == [{0}, {1}]
        # The server has the weights that the trainer has in this step, or their log-probs would differ.
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
        assert logged(trainer, "server/restarts") == [0, 1]
        assert len(begun) == 2 * 8, "an agent did not only wait longer"
        assert logged(trainer, "episodes/tokens_dropped") == [0, 0]
        trainer.end()


def test_the_turns_of_an_episode_stay_with_their_server(tmp_path: Path, server: Server) -> None:
    with proxy_of(server.url) as one, proxy_of(server.url) as other:
        second_door(other)
        urls = [one.url, other.url]
        trainer = online(tmp_path, server, vllm_server_base_url=urls, weight_sync="shm", talks="faithful", max_steps=1)
        homes: list[tuple[int, str]] = []
        generator = trainer.generator
        assert isinstance(generator, VLLMGenerator)
        asked = generator._asker.ask_once

        async def noted(at: Any, prompt: Any, timeout: float) -> Any:
            homes.append((id(prompt.home), at.url))
            return await asked(at, prompt, timeout)

        generator._asker.ask_once = noted  # type: ignore[method-assign]
        trainer.train()
        assert len({url for _, url in homes}) == 2, "all at one server"
        assert len(set(homes)) == len({home for home, _ in homes}), "an episode moved to another server"
        trainer.end()
