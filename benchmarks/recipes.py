"""The memory of models of known shapes on one GPU and on several, as `prefrl doctor` estimates it.

    python -m benchmarks.recipes     writes results/recipes.json, from which docs/make_tables.py makes a table

Nothing is downloaded: the shapes are those that the authors of the models have published.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from prefrl.models.footprint import Footprint
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.arguments.launch import LaunchArguments
from prefrl.scripts.checkup.parallel import footprint_of_process
from prefrl.scripts.checkup.resources import MicroBatch, footprint_of
from prefrl.scripts.checkup.subject import Subject, plan_of
from prefrl.scripts.inputs import options_of, read

RESULTS = Path(__file__).parent / "results/recipes.json"
_GIB = 2**30
TOKENS = 8192  # of a micro-batch

_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Model type, the sizes above, head_dim, vocabulary, whether the embeddings are the head, too.
SHAPES: dict[str, tuple[str, tuple[int, ...], int, int, bool]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", (576, 1536, 30, 9, 3), 64, 49152, True),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", (896, 4864, 24, 14, 2), 64, 151936, True),
    "Qwen/Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8), 128, 151936, True),
    "google/gemma-3-1b-it": ("gemma3_text", (1152, 6912, 26, 4, 1), 256, 262144, True),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", (2048, 8192, 16, 32, 8), 64, 128256, True),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("llama", (2048, 8192, 24, 32, 32), 64, 49152, True),
    "Qwen/Qwen3-1.7B": ("qwen3", (2048, 6144, 28, 16, 8), 128, 151936, True),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", (3072, 8192, 28, 24, 8), 128, 128256, True),
    "Qwen/Qwen3-4B": ("qwen3", (2560, 9728, 36, 32, 8), 128, 151936, True),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", (4096, 14336, 32, 32, 8), 128, 128256, False),
    "Qwen/Qwen3-8B": ("qwen3", (4096, 12288, 36, 32, 8), 128, 151936, False),
    "google/gemma-2-9b-it": ("gemma2", (3584, 14336, 42, 16, 8), 256, 256000, True),
    "Qwen/Qwen3-14B": ("qwen3", (5120, 17408, 40, 40, 8), 128, 151936, False),
    "Qwen/Qwen3-32B": ("qwen3", (5120, 25600, 64, 64, 8), 128, 151936, False),
}
_FULL = ("--bf16", "--activation_checkpointing")
_LORA = (*_FULL, "--use_peft", "--lora_target_modules", "all-linear", "--dtype", "bfloat16")
# Title -> flags, and the number of processes that divide weights and states by ZeRO-3.
SETUPS: dict[str, tuple[tuple[str, ...], int]] = {
    "LoRA, 1 GPU": (_LORA, 1),
    "all weights, 1 GPU": (_FULL, 1),
    "all weights, 8 GPUs": (_FULL, 8),
    "all weights, 4 nodes of 8": (_FULL, 32),
}


def described(name: str) -> dict[str, Any]:
    """The `config.json` of a model, as far as memory depends on it."""
    kind, sizes, head_dim, vocabulary, is_tied = SHAPES[name]
    shared = {"head_dim": head_dim, "vocab_size": vocabulary, "tie_word_embeddings": is_tied}
    return {"model_type": kind, **dict(zip(_NAMES, sizes, strict=True)), **shared}


def estimate(name: str) -> dict[str, float]:
    """Parameters, and GiB of a process at the peak of a step of SFT for each setup, without what libraries take."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described(name)), encoding="utf-8")
        whole: dict[tuple[str, ...], tuple[Subject, Footprint]] = {}
        given: dict[tuple[str, ...], Given] = {}
        for setup, (flags, processes) in SETUPS.items():
            if flags not in whole:
                words = ["--model_name_or_path", folder, "--dataset_name", "-", "--output_dir", "-", "--use_cpu"]
                words += [*flags, "--max_tokens_per_micro_batch", str(TOKENS)]
                given[flags] = read(REGISTRY["sft"], words)
                subject = Subject(REGISTRY["sft"], *options_of(REGISTRY["sft"], given[flags]))
                whole[flags] = subject, footprint_of(subject, MicroBatch(8, TOKENS, TOKENS, 0))
            subject, of_one = whole[flags]
            found["parameters"] = sum(parameter.numel() for parameter in subject.model.parameters())
            if processes > 1:
                _, config = options_of(REGISTRY["sft"], given[flags], num_processes=processes)
                plan = plan_of(config, LaunchArguments(accelerate_config="zero3", num_processes=processes))
                of_one = footprint_of_process(subject, plan, of_one)
            found[setup] = round(of_one.peak / _GIB, 1)
    return found


def markdown() -> str:
    """The table of what was found."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [f"| model | parameters | {' | '.join(SETUPS)} |", f"|---|---|{'---|' * len(SETUPS)}"]
    for name, row in found.items():
        cells = [f"{row[setup]:g}" for setup in SETUPS]
        lines.append(f"| `{name}` | {row['parameters'] / 1e9:.2f} B | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Estimate all, and write what was found."""
    found: dict[str, dict[str, float]] = {}
    for name in SHAPES:
        found[name] = estimate(name)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(markdown())


if __name__ == "__main__":
    main()
