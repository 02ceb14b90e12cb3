"""GRPO in a text game: python examples/grpo_guessing_game.py [--model_name_or_path MODEL] [--max_steps 80].

The other side answers each guess; no tool is called. Without a model, a tiny one with random weights learns to guess
the middle first.
"""

import argparse
import re
from typing import Any

from prefrl import Environment, GRPOConfig, GRPOTrainer, Observation


class GuessingGame(Environment):
    """A secret number from 1 to 3, and two guesses, which suffice."""

    question = "Guess my number from 1 to 3. Say only a number."

    def reset(self, **row: Any) -> str:
        self.secret = 1 + self.seed % 3
        self.num_left = 2
        return self.question

    def respond(self, message: Any) -> Observation:
        found = re.findall(r"\d+", message["content"])
        self.num_left -= 1
        if not found:
            return Observation(done=True)
        missing = self.secret - int(found[-1])
        if missing == 0:
            return Observation("right", reward=1.0, done=True)
        close = 0.2 * (abs(missing) == 1)
        return Observation("higher" if missing > 0 else "lower", reward=close, done=self.num_left == 0)


class TinyGame(GuessingGame):
    question = "guess"


def main(model: Any = None, output_dir: str = "runs/guessing_game", max_steps: int = 80) -> list[float]:
    """Train; returns the mean reward of each step. The best is 1 for a win, and 0.2 for two of three first guesses."""
    from tiny import tiny_model, tiny_tokenizer  # here, so that a YAML file can name the game from another folder

    tiny = model is None
    tokenizer = tiny_tokenizer(["guess", "higher", "lower", "right", *map(str, range(1, 4))]) if tiny else None
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        learning_rate=2e-3 if tiny else 1e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=128 if tiny else 16,
        num_generations=64 if tiny else 8,
        max_completion_length=20 if tiny else 128,
        max_turns=2,
        temperature=1.0,
        beta=0.0,
        entropy_coef=0.02 if tiny else 0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        tiny_model(tokenizer) if tokenizer else model,
        args=config,
        processing_class=tokenizer,
        environment_factory=TinyGame if tiny else GuessingGame,
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_steps", type=int, default=80)
    options = parser.parse_args()
    rewards = main(options.model_name_or_path, max_steps=options.max_steps)
    print(f"mean reward: {sum(rewards[:3]) / 3:.2f} at first, {sum(rewards[-3:]) / 3:.2f} at the end")
