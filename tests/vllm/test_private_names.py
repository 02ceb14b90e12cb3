"""What prefrl takes from vLLM is in the vLLM that is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefrl.scripts.launch.vllm_serve import CONTRACT, CPU_FLAGS, FLAGS, REFUSED, REFUSED_SHORT
from tests.private_names import gone_from_vllm
from tests.vllm.server import PYTHON, START_SECONDS, environment, forks

pytestmark = pytest.mark.vllm


def test_what_prefrl_uses_of_vllm_is_there() -> None:
    (vllm,) = PYTHON.parents[1].glob("lib/python3.*/site-packages/vllm")
    assert not gone_from_vllm(vllm.parent)


def test_vllm_knows_every_flag_that_is_refused_or_given(tmp_path: Path) -> None:
    path, log, variables = tmp_path / "flags", tmp_path / "log", environment(key=None)
    # What modules write when they end would stand below the flags.
    with path.open("wb") as output, log.open("wb") as errors:
        asked = forks().start("tests.vllm.forked", ["flags"], environment=variables, output=output, errors=errors)
        assert asked.wait(START_SECONDS) == 0, log.read_text(encoding="utf-8")
    known = set(json.loads(path.read_text(encoding="utf-8").splitlines()[-1]))
    ours = {f"--{flag}" for flag in (*REFUSED, *FLAGS.values())} | set(CPU_FLAGS)
    ours |= {word for word in CONTRACT if word.startswith("--")}
    assert ours | REFUSED_SHORT | {"--enable-lora"} <= known


def test_what_is_gone_is_named_with_its_users(tmp_path: Path) -> None:
    reload = tmp_path / "vllm/model_executor/model_loader/reload"
    reload.mkdir(parents=True)
    (reload / "layerwise.py").write_text(
        "from .elsewhere import _place_kernel_tensors\nclass A:\n    _registry = {}\n"
    )
    (tmp_path / "vllm/config").mkdir()
    (tmp_path / "vllm/config/api.py").write_text('route = "/pause"; max_logprobs = VLLM_PLUGINS')
    gone = gone_from_vllm(tmp_path)
    place = "vllm.model_executor.model_loader.reload.layerwise"
    assert f"{place}.get_layerwise_info, which prefrl/generation/vllm/plugin.py uses" in gone
    assert not [line for line in gone if line.startswith(f"{place}._place_kernel_tensors")]
    assert {"/resume", "logprobs_mode", "VLLM_SERVER_DEV_MODE"} <= {*gone}
    assert not {"/pause", "max_logprobs", "VLLM_PLUGINS"} & {*gone}
