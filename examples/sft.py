"""Supervised fine-tuning on a JSON lines file: python examples/sft.py MODEL TEXTS.jsonl OUTPUT_DIR.

Rows are {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion": ...}.
"""

import sys

from datasets import load_dataset

from prefrl import SFTConfig, SFTTrainer


def main(model: str, data_file: str, output_dir: str) -> None:
    """Train for one epoch and save."""
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=output_dir, num_train_epochs=1, per_device_train_batch_size=8, packing=True),
        train_dataset=load_dataset("json", data_files=data_file, split="train"),
    )
    trainer.train()
    trainer.save_model(output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
