"""GRPO with a tool: python examples/grpo_calculator.py [--model_name_or_path MODEL] [--max_steps 120].

Without a model, a tiny one with random weights learns to call the calculator and to repeat its result.
"""

import argparse
from typing import Any

from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

from prefrl import GRPOConfig, GRPOTrainer


def square(number: int) -> int:
    """Multiply a number by itself.

    Args:
        number: The number.
    """
    return number * number


def reward(completions: list[Any], number: list[int], **columns: Any) -> list[float]:
    """0.3 for a call with a number, 0.3 if it is the right one, and 0.4 for the right answer after a call."""
    rewards = []
    for messages, asked in zip(completions, number, strict=True):
        given = [call["function"]["arguments"].get("number") for call in messages[0].get("tool_calls", [])][:1]
        has_answer = messages[-1]["content"].replace(".", " ").split()[-1:] == [str(asked * asked)]
        has_called = any(isinstance(one, int) for one in given)
        rewards.append(has_called * (0.3 + 0.3 * (given == [asked]) + 0.4 * has_answer))
    return rewards


def parse(text: str) -> dict[str, Any]:
    """How the tiny model calls: `square 3`."""
    name, *values = text.replace("<end>", "").split() or [""]
    if name != "square":
        return {"content": " ".join([name, *values])}
    arguments = {"number": int(values[0]) if values and values[0].isdigit() else None}
    return {"content": "", "tool_calls": [{"function": {"name": "square", "arguments": arguments}}]}


def main(model: Any = None, output_dir: str = "runs/calculator", max_steps: int = 120) -> list[float]:
    """Train; returns the mean reward of each step."""
    tiny = model is None
    tokenizer = tiny_tokenizer(["square", *map(str, range(10)), "16"]) if tiny else None
    text = "{}" if tiny else "What is the square of {}? Call the tool. Then answer with the number only."
    numbers = [i % 5 if tiny else 11 + i % 89 for i in range(512)]
    rows = [{"prompt": [{"role": "user", "content": text.format(number)}], "number": number} for number in numbers]
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        learning_rate=2e-3 if tiny else 1e-5,
        per_device_train_batch_size=128 if tiny else 16,
        num_generations=16 if tiny else 8,
        max_completion_length=14 if tiny else 256,
        max_tool_calling_iterations=1,
        temperature=1.0,
        beta=0.0,
        entropy_coef=0.005 if tiny else 0.0,
        scale_rewards="none" if tiny else "group",
        tool_parser=parse if tiny else None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    policy = tiny_model(tokenizer) if tokenizer else model
    trainer = GRPOTrainer(policy, reward, config, Dataset.from_list(rows), processing_class=tokenizer, tools=[square])
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_steps", type=int, default=120)
    options = parser.parse_args()
    rewards = main(options.model_name_or_path, max_steps=options.max_steps)
    print(f"mean reward: {sum(rewards[:3]) / 3:.2f} at first, {sum(rewards[-3:]) / 3:.2f} at the end")
