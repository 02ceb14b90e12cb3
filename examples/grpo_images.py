"""GRPO with images: python examples/grpo_images.py [--model_name_or_path MODEL] [--max_steps 80].

A model learns to name the color of a square. Without a model, a tiny one with random weights learns to say one of
three words first, and then, by rewards alone, which one.
"""

import argparse
import random
from typing import Any

from datasets import Dataset
from PIL import Image
from tiny_vision import tiny_vision_model

from prefrl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

COLORS = ("red", "green", "blue")
OPTIONS: dict[str, Any] = {"save_strategy": "no", "report_to": [], "lr_scheduler_type": "constant"}


def squares(count: int, question: str) -> Dataset:
    """Rows with the image of a square."""
    colors = random.Random(0).choices(COLORS, k=count)
    prompt = [{"role": "user", "content": question}]
    rows = [{"prompt": prompt, "color": color, "images": [Image.new("RGB", (56, 56), color)]} for color in colors]
    return Dataset.from_list(rows)


def names_color(completions: list[Any], color: list[str], **columns: Any) -> list[float]:
    """1 for the name of the color and nothing else."""
    said = [messages[0]["content"].strip(" .").lower() for messages in completions]
    return [float(word == name) for word, name in zip(said, color, strict=True)]


def tiny_speaker(rows: Dataset, output_dir: str) -> tuple[Any, Any]:
    """A tiny model that says one of the three words, and its processor."""
    model, processor = tiny_vision_model([*COLORS, "Color?"])
    draw = random.Random(1)
    guesses = [[{"role": "assistant", "content": draw.choice(COLORS)}] for _ in rows]
    config = SFTConfig(output_dir, max_steps=15, per_device_train_batch_size=24, learning_rate=3e-3, **OPTIONS)
    SFTTrainer(model, config, train_dataset=rows.add_column("completion", guesses), processing_class=processor).train()
    return model, processor


def main(model: Any = None, output_dir: str = "runs/squares", max_steps: int = 80) -> list[float]:
    """Train; returns the mean reward of each step."""
    tiny, processor = model is None, None
    rows = squares(96, "Color?" if tiny else "What color is the square? Answer with one word: red, green or blue.")
    if tiny:
        model, processor = tiny_speaker(rows, output_dir)
    config = GRPOConfig(
        output_dir,
        max_steps=max_steps,
        learning_rate=3e-4 if tiny else 1e-6,
        per_device_train_batch_size=48 if tiny else 8,
        num_generations=8,
        max_completion_length=4 if tiny else 16,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        **OPTIONS,
    )
    trainer = GRPOTrainer(model, names_color, config, rows, processing_class=processor)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_steps", type=int, default=80)
    options = parser.parse_args()
    rewards = main(options.model_name_or_path, max_steps=options.max_steps)
    print(f"mean reward: {sum(rewards[:3]) / 3:.2f} at first, {sum(rewards[-3:]) / 3:.2f} at the end")
