"""Loss and gradient norm of one step, in TRL 1.16 and prefrl: SmolLM2 on rows of GSM8K."""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import Any

from datasets import Dataset

from benchmarks.agreement_with_trl import trl_values
from benchmarks.inputs import Completions
from benchmarks.prefrl_side import ScriptedGenerator
from benchmarks.real.inputs import Inputs, graded_solutions, pairs, worked_examples
from benchmarks.trl_side import ScriptedGenerate
from prefrl.trainer.configs import GRPOConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer
from tests.golden import cases
from tests.golden.cases import AgreementCase, prefrl_values

__all__ = ["measure"]

NUM_ROWS = 4
GRPO_LOSSES = ("grpo", "dapo")
GRPO_OPTIONS: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 512,
    "temperature": 1.0,
    "beta": 0.0,
    "max_steps": 1,
    "learning_rate": 1e-3,
    "optim": "sgd",
    "max_grad_norm": 1e9,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def measure(inputs: Inputs) -> list[dict[str, Any]]:
    """A row for each algorithm: both libraries' loss and gradient norm."""
    rows = []
    for trainer in ("sft", "dpo", "reward"):
        case = AgreementCase(trainer)
        theirs, ours = (values(case, _offline(inputs, trainer)) for values in (trl_values, prefrl_values))
        rows.append(_row(trainer, theirs, ours))
    for loss in GRPO_LOSSES:
        rows.append(_row(f"grpo, loss {loss}", _grpo(inputs, "trl", loss), _grpo(inputs, "prefrl", loss)))
    return rows


def _row(name: str, theirs: dict[str, float], ours: dict[str, float]) -> dict[str, Any]:
    figures = {key: (theirs[key], ours[key]) for key in ("loss", "grad_norm")}
    # The loss of GRPO's first step is near 0: its advantages sum to 0 in each group.
    scale = {"loss": max(abs(theirs["loss"]), 1e-2), "grad_norm": abs(theirs["grad_norm"])}
    difference = max(abs(a - b) / scale[key] for key, (a, b) in figures.items())
    return {"name": name, **figures, "difference": difference}


def _offline(inputs: Inputs, trainer: str) -> cases.Inputs:
    rows = (worked_examples(inputs) if trainer == "sft" else pairs(inputs)).select(range(NUM_ROWS))
    tokenizer = inputs.tokenizer()

    # As text, to which both libraries add the end token: TRL's conversations also learn the newline of the template.
    def rendered(row: dict[str, Any]) -> dict[str, str]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        return {"prompt": prompt} | {side: row[side][0]["content"] for side in row if side != "prompt"}

    return cases.Inputs(
        model=inputs.reward_model() if trainer == "reward" else inputs.policy(),
        reference=inputs.reference() if trainer == "dpo" else None,
        tokenizer=tokenizer,
        rows=Dataset.from_list([rendered(row) for row in rows]),
    )


def _grpo(inputs: Inputs, library: str, loss: str) -> dict[str, float]:
    """One step on the four solutions of two questions, whose rewards are whether they are right."""
    rows, tokenizer, model = graded_solutions(inputs)[:2], inputs.tokenizer(), inputs.policy()
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    length = min(map(len, prompts))  # the ends of the prompts differ, and have no padding
    completions: Completions = {
        tuple(prompt[-length:]): [_token_ids(tokenizer, text) for text, _ in row["solutions"]]
        for prompt, row in zip(prompts, rows, strict=True)
    }
    right = {tuple(_token_ids(tokenizer, text)) for row in rows for text, is_right in row["solutions"] if is_right}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(tuple(ids) in right) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder,
            "loss_type": loss,
            "per_device_train_batch_size": 4 * len(rows),
            **GRPO_OPTIONS,
        }
        data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
        trainer: Any
        if library == "trl":
            trl = import_module("trl")  # only installed in the environment of the benchmark
            args = trl.GRPOConfig(**options, bf16=False, gradient_checkpointing=False)
            trainer = trl.GRPOTrainer(model, reward, args, data, processing_class=tokenizer)
            model.generate = ScriptedGenerate(completions, length, pad=tokenizer.pad_token_id)
        else:
            trainer = GRPOTrainer(model, reward, GRPOConfig(**options, top_k=None), data, processing_class=tokenizer)
            trainer.generator = ScriptedGenerator(completions, length)
        trainer.train()
        return {key: value for key, value in trainer.state.log_history[0].items() if isinstance(value, float)}


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text).input_ids, tokenizer.eos_token_id]
