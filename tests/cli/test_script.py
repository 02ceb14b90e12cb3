"""A script in the shape of TRL's own: only the name of the package differs."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = """
from datasets import load_dataset
from prefrl import (
    DatasetMixtureConfig, DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser,
    get_dataset, get_peft_config, get_quantization_config,
)

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config(fail_with_unknown_args=False)
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    if dataset_args.datasets:
        dataset = get_dataset(dataset_args)
    else:
        dataset = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    trainer = DPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training_args.output_dir)
    trainer.end()
"""


def test_a_script_of_trls_shape_trains_on_a_mixture(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "script.py").write_text(SCRIPT, encoding="utf-8")
    (workspace / "run.yaml").write_text(
        f"model_name_or_path: {model_folder}\ndatasets:\n"
        "  - {path: json, data_files: pairs.jsonl, fraction: 1}\n  - {path: pairs.jsonl, fraction: 1}\n"
        "test_split_size: 0.25\neval_strategy: steps\neval_steps: 1\nuse_cpu: true\nreport_to: none\n"
        "for_another_program: 1\n",
        encoding="utf-8",
    )
    lora = ["--use_peft", "--lora_r", "3", "--lora_target_modules", "q_proj", "v_proj"]
    argv = ["script.py", "--config", "run.yaml", "--output_dir", "out", "--max_steps", "1", *lora]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path("script.py", run_name="__main__")
    assert "Training completed." in capsys.readouterr().out
    assert json.loads((workspace / "out/adapter_config.json").read_text(encoding="utf-8"))["r"] == 3
