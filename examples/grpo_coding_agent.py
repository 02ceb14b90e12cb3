"""GRPO of a coding agent in a sandbox: python examples/grpo_coding_agent.py [--model_name_or_path MODEL].

The agent is examples/coding_agent.py, a program of its own, which needs `pip install openai`. Each episode has a
folder with a function and its tests; the reward is 1 if hidden tests pass on what the agent has made of the function.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from prefrl import CommandAgent, GRPOConfig, GRPOTrainer

RESULTS = {"a+b": (5, 11), "a-b": (-1, -3), "a*b": (6, 28)}  # of f(2, 3), which tests show, and of f(4, 7)
TESTS = "from f import f\nassert f(2, 3) == {0}, 'f(2, 3) must be {0} , not ' + str(f(2, 3))\n"
# In a process of its own, the model's code can neither end the test nor read what it expects.
HIDDEN = """import os, subprocess, sys
os.remove(__file__)
code = "from f import f; print(f(4, 7))"
sys.exit(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() != "{1}")
"""


def rows() -> list[dict[str, Any]]:
    """A function for each pair of a wrong and a right expression."""
    found = []
    for right, results in RESULTS.items():
        tests, hidden = {"tests.py": TESTS.format(*results)}, {"hidden.py": HIDDEN.format(*results)}
        for wrong in [one for one in RESULTS if one != right]:
            found.append({"files": {"f.py": f"def f(a, b):\n    return {wrong}\n", **tests}, "hidden": hidden})
    return found


def main(
    model: Any = None, output_dir: str = "runs/coding_agent", max_steps: int = 40, num_generations: int = 8
) -> list[float]:
    """Train; returns the mean reward of each step."""
    from tiny import tiny_model, tiny_tokenizer  # here, so that the rows can be read from another folder

    tiny, words = model is None, [*RESULTS, "must", "be", *(str(shown) for shown, _ in RESULTS.values())]
    tokenizer = tiny_tokenizer(words) if tiny else None
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        learning_rate=3e-3 if tiny else 1e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=3 * num_generations,
        num_generations=num_generations,
        max_completion_length=24 if tiny else 512,
        max_concurrent_environments=8,
        temperature=1.0,
        beta=0.0,
        entropy_coef=0.02 if tiny else 0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    program, tests = Path(__file__).with_name("coding_agent.py"), f"{sys.executable} hidden.py"
    agent = CommandAgent(
        f"{sys.executable} {program}", files="files", solution=["f.py"], tests=tests, test_files="hidden"
    )
    policy, data = tiny_model(tokenizer) if tokenizer else model, Dataset.from_list(rows())
    trainer = GRPOTrainer(policy, args=config, train_dataset=data, processing_class=tokenizer, agent=agent)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--write", metavar="FILE.jsonl", help="write the dataset, and do not train")
    options = parser.parse_args()
    if options.write:
        Dataset.from_list(rows()).to_json(options.write)
    else:
        rewards = main(options.model_name_or_path, max_steps=options.max_steps)
        print(f"mean reward: {sum(rewards[:3]) / 3:.2f} at first, {sum(rewards[-3:]) / 3:.2f} at the end")
