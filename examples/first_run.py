"""The model and the data of docs/tutorials/first_run.md: python examples/first_run.py FOLDER.

A tiny model reads sums of numbers from 1 to 9, half of them with a wrong answer: it comes to know the right one, but
says it only about every second time.
"""

import json
import random
import sys
from pathlib import Path

from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

from prefrl import SFTConfig, SFTTrainer


def main(folder: str, max_steps: int = 120) -> None:
    """Write `model` and `sums.jsonl` into the folder."""
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    chance = random.Random(0)
    rows = []
    for a, b in sums * 16:
        said = a + b if chance.random() < 0.5 else chance.randint(2, 18)
        question, answer = {"role": "user", "content": f"{a} + {b} ="}, {"role": "assistant", "content": str(said)}
        rows.append({"prompt": [question], "completion": [answer]})
    tokenizer = tiny_tokenizer(["+", "=", *map(str, range(1, 19))])
    config = SFTConfig(
        output_dir=f"{folder}/sft",
        max_steps=max_steps,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        save_strategy="no",
        use_cpu=True,
    )
    model = tiny_model(tokenizer, family="llama")
    trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{folder}/model")
    asked = [{"prompt": [{"role": "user", "content": f"{a} + {b} ="}], "answer": str(a + b)} for a, b in sums]
    Path(folder, "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
