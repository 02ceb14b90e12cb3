"""Graders that ask a model, on a real server of this project, with its key."""

from __future__ import annotations

from typing import Any

import pytest

from prefrl.errors import RewardError
from prefrl.rewards import LabelModel, RewardRunner, ScoreModel
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm


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
