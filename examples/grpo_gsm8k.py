"""GRPO on grade-school maths: python examples/grpo_gsm8k.py MODEL GSM8K.jsonl OUTPUT_DIR.

Rows of the file are {"question": ..., "answer": "... #### 42"}, as in the GSM8K dataset.
"""

import sys
from typing import Any

from datasets import load_dataset

from prefrl import GRPOConfig, GRPOTrainer
from prefrl.rewards import numeric_reward

INSTRUCTION = "Think step by step. End with the answer in \\boxed{}."


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """The question as a conversation; the column answer is left for the reward."""
    return {
        "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row["question"]}],
    }


def main(model: str, data_file: str, output_dir: str) -> None:
    """Train for one epoch and save."""
    dataset = load_dataset("json", data_files=data_file, split="train").map(to_prompt, remove_columns=["question"])
    config = GRPOConfig(
        output_dir=output_dir,
        learning_rate=1e-6,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=256,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        log_completions=True,
    )
    trainer = GRPOTrainer(model, numeric_reward, config, dataset)
    trainer.train()
    trainer.save_model(output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
