"""Direct preference optimization on a JSON lines file: python examples/dpo.py MODEL PAIRS.jsonl OUTPUT_DIR.

Rows are {"prompt": ..., "chosen": ..., "rejected": ...}, all text or all lists of messages.
"""

import sys

from datasets import load_dataset

from prefrl import DPOConfig, DPOTrainer


def main(model: str, data_file: str, output_dir: str) -> None:
    """Train for one epoch and save."""
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=output_dir,
            num_train_epochs=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            learning_rate=5e-7,
            beta=0.1,
            precompute_ref_log_probs=True,  # no second model in memory while training
            logging_steps=1,
        ),
        train_dataset=load_dataset("json", data_files=data_file, split="train"),
    )
    trainer.train()
    trainer.save_model(output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
