"""A package that an option needs is missing: one line says which before the model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from prefrl.models import load
from prefrl.scripts.main import main
from tests.cli.conftest import write_jsonl

QUESTIONS = ["--dataset_name", "questions.jsonl", "--num_generations", "2"]
TEXTS = ["--dataset_name", "texts.jsonl"]


@pytest.mark.parametrize(
    ("words", "package", "message"),
    [
        (["sft", *TEXTS, "--use_peft"], "peft", "use_peft=True needs peft: pip install 'prefrl[peft]'"),
        (
            ["sft", *TEXTS, "--load_in_4bit", "--use_peft", "--dtype", "float32"],
            "bitsandbytes",
            "load_in_4bit=True needs bitsandbytes: pip install 'prefrl[quantization]'",
        ),
        (
            ["sft", *TEXTS, "--optim", "lamb"],
            "pytorch_optimizer",
            "optim='lamb' needs pytorch_optimizer: pip install 'prefrl[optimizers]'",
        ),
        (
            ["sft", *TEXTS, "--report_to", "wandb"],
            "wandb",
            "report_to='wandb': its package is not installed. Run `pip install wandb`",
        ),
        (
            ["sft", *TEXTS, "--attn_implementation", "flash_attention_2"],
            "flash_attn",
            "Run `pip install flash-attn`, or set attn_implementation='sdpa'.",
        ),
        (
            ["grpo", *QUESTIONS, "--reward_funcs", "accuracy_reward"],
            "math_verify",
            "accuracy_reward needs math_verify: pip install 'prefrl[math]'",
        ),
        (
            ["grpo", *QUESTIONS, "--reward_funcs", "string_check(operation='fuzzy', reference='{solution}')"],
            "rapidfuzz.fuzz",
            "pip install 'prefrl[fuzzy]'",
        ),
        (
            ["grpo", *QUESTIONS, "--reward_funcs", "reasoning_gym:leg_counting"],
            "reasoning_gym",
            "a reward of reasoning_gym needs reasoning_gym: pip install 'prefrl[reasoning-gym]'",
        ),
        (
            ["sft", *TEXTS, "--optim", "adamw_bnb_8bit"],
            "bitsandbytes",
            "optim='adamw_bnb_8bit' needs bitsandbytes: pip install 'prefrl[quantization]'",
        ),
        (
            ["sft", *TEXTS, "--optim", "lomo"],
            "lomo_optim",
            "optim='lomo' needs lomo_optim: pip install 'lomo-optim'",
        ),
    ],
)
def test_one_line_names_the_missing_package_before_the_model_is_loaded(
    words: list[str],
    package: str,
    message: str,
    workspace: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(load, "_from_pretrained", refuse)
    monkeypatch.setitem(sys.modules, package, None)
    row = {"prompt": "1+1=", "solution": "2", "answer": "2", "metadata": "{}"}
    write_jsonl(workspace / "questions.jsonl", [row] * 8)
    argv = [*words, "--model_name_or_path", str(model_folder), "--use_cpu", "--output_dir", "out"]
    assert main(argv) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"prefrl {words[0]}: ")
    assert message in last
    assert main(["doctor", *argv]) == 2
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
