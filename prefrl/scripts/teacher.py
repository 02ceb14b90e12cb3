"""`prefrl teacher`: what a model finds likely at each token of a dataset's completions, for distillation without it.

Rows are scored in parts. Each part is a file in a folder beside the output until all of them are there, so that a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from annotated_types import Ge
from rich.console import Console

from prefrl.errors import ConfigError, DataError
from prefrl.options.fields import check_fields, opt, parse_json
from prefrl.options.generation_rules import LEAST_TEMPERATURE
from prefrl.run.folder import check_writable
from prefrl.scripts.arguments.datasets import FILES, SHAPING, ColumnArguments, DatasetConfig, load_part
from prefrl.scripts.arguments.model_config import DType
from prefrl.scripts.declaration import command

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prefrl.models.scoring import ScoringRequest

# Increase this number when the same model and rows no longer give the same parts.
_VERSION = 1
_VALUES_OF_A_PART = 2**22  # log-probs, about 20 MB
_RUN = "run.json"


def _named(name: str, text: str) -> Any:
    """An option that has a shorter name."""
    return dataclasses.field(default=None, metadata={"help": text, "aliases": [f"--{name}"]})


@dataclass
class TeacherArguments(ColumnArguments):
    """The teacher, the rows, and where its log-probs go."""

    GROUP: ClassVar[str] = "Teacher, rows and output"

    model_name_or_path: str | None = _named("model", "Folder of a model or an adapter, or its name on the Hub.")
    dataset_name: str | None = _named(
        "dataset", f"Dataset with columns prompt and completion: a name on the Hub, a folder, or {FILES}."
    )
    output_file: str | None = _named(
        "output", "File for the rows and the teacher's columns. It must end in .parquet, and must not exist."
    )
    dataset_split: str | None = opt(
        None, "Split, such as train[:100]. The default is all of a file, and otherwise train."
    )
    top_k: Annotated[int, Ge(1)] = opt(
        64, "Tokens that are stored at each place: the most likely ones. All others count as one."
    )
    temperature: Annotated[float, Ge(LEAST_TEMPERATURE)] = opt(
        1.0, "Temperature of the teacher's distribution, which must be that of the training."
    )
    chat_template_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for the chat template, as in the training. On the command line, give them as JSON."
    )
    max_tokens_per_batch: Annotated[int, Ge(1)] = opt(
        8192, "Most tokens in a forward pass. A prompt that neighboring rows share counts once."
    )
    dtype: DType = opt("auto", "Data type of the weights. 'auto' takes that of the files.")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_json(self, "chat_template_kwargs")
        check_fields(self)
        needed = {"model_name_or_path": "teacher", "dataset_name": "dataset", "output_file": "new file"}
        for option, what in needed.items():
            if getattr(self, option) is None:
                raise ConfigError(f"{option}: not given. Set it to a {what}.")
        if not str(self.output_file).endswith(".parquet"):
            raise ConfigError(f"output_file={self.output_file!r}: must end in .parquet")


@command(
    "teacher",
    TeacherArguments,
    about="Store what a model finds likely at each token of a dataset's completions. prefrl distillation then learns "
    "from the file without the model.\n\nExample:\n"
    "  prefrl teacher --model Qwen/Qwen3-8B --dataset rows.jsonl --top_k 64 --output rows.parquet",
    positional=("model_name_or_path", "dataset_name"),
)
def main(options: TeacherArguments) -> int:
    """Score the rows that are not scored yet, and write the file."""
    output, console = Path(str(options.output_file)), Console(stderr=True)
    if output.exists():
        raise ConfigError(f"output_file={str(output)!r}: exists already. Remove it, or choose another name.")
    dataset = _dataset(options)
    check_writable(output.parent, option="folder of output_file")

    from prefrl.data.tokenize import with_given_ids
    from prefrl.models.export import load_merged, tokenizer_of_checkpoint

    name = str(options.model_name_or_path)
    with console.status("Loading the model"):
        model = load_merged(name, dtype=options.dtype).eval()
        tokenizer = tokenizer_of_checkpoint(name, model)
    kwargs = cast("dict[str, Any] | None", options.chat_template_kwargs)
    rows = with_given_ids(dataset, tokenizer, chat_template_kwargs=kwargs).select_columns(
        ["given_ids", "given_trainable"]
    )
    teacher = _Teacher.of(model, tokenizer, options)
    parts = _Parts.of(output, rows, teacher.identity, top_k=options.top_k)
    parts.tell(console)
    for number, (start, stop) in enumerate(parts.bounds):
        if not parts.path(number).exists():
            parts.write(number, teacher.columns(rows.select(range(start, stop))))
            console.print(f"{stop:,} of {len(rows):,} rows", highlight=False)
    num_tokens = parts.join(dataset)
    size = output.stat().st_size / num_tokens
    print(f"{len(rows):,} rows with {num_tokens:,} tokens of completions are in {output}, {size:.0f} bytes a token.")
    at = "" if options.temperature == 1 else f" --temperature {options.temperature:g}"
    print(f"To learn from them: prefrl distillation --dataset_name {output} --on_policy_fraction 0{at} ...")
    return 0


def _dataset(options: TeacherArguments) -> datasets.Dataset:
    """The rows, if they can be scored."""
    from prefrl.data.images import image_column
    from prefrl.data.teacher_columns import TEACHER_COLUMNS

    path = str(options.dataset_name)
    shaping: dict[str, Any] = {name: getattr(options, name) for name in SHAPING}
    part = DatasetConfig(path=path, split=options.dataset_split or "train", **shaping)
    loaded: Any = load_part(part, streaming=False, path_option="dataset_name", split_option="dataset_split")
    names = loaded.column_names
    if missing := [name for name in ("prompt", "completion") if name not in names]:
        raise DataError(
            f"dataset_name={path!r}: has no column {' and no column '.join(map(repr, missing))}, but "
            f"{', '.join(names)}. Name them with columns, such as {{prompt: question, completion: answer}}."
        )
    if made := [name for name in (*TEACHER_COLUMNS, "given_ids", "given_trainable") if name in names]:
        raise DataError(f"dataset_name={path!r}: has a column {made[0]!r} already. Remove it.")
    if (images := image_column(loaded)) is not None:
        raise DataError(
            f"dataset_name={path!r}: column {images!r} holds images, which this command does not support. Distill "
            "with teacher_model_name_or_path instead."
        )
    if not len(loaded):
        raise DataError(f"dataset_name={path!r}: has no rows")
    return cast("datasets.Dataset", loaded)


@dataclass(frozen=True, slots=True)
class _Teacher:
    """Computes the columns of rows."""

    model: PreTrainedModel
    fingerprint: dict[str, Any]
    top_k: int
    max_tokens: int

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: TeacherArguments) -> _Teacher:
        """Put the model on its device."""
        import torch

        from prefrl.data.teacher_columns import fingerprint_of
        from prefrl.models.fingerprint import weights_fingerprint
        from prefrl.models.scoring import prepare_for_scoring

        num_tokens = model.get_output_embeddings().weight.shape[0]
        if options.top_k > num_tokens:
            raise ConfigError(f"top_k={options.top_k}: the model has only {num_tokens} tokens. Lower it.")
        fingerprint = fingerprint_of(
            tokenizer,
            temperature=options.temperature,
            weights=weights_fingerprint(model),
            dtype=str(model.dtype).removeprefix("torch."),
        )
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        prepare_for_scoring(model)
        return cls(model, fingerprint, options.top_k, options.max_tokens_per_batch)

    @property
    def identity(self) -> list[Any]:
        """What the columns depend on, besides the rows."""
        return [_VERSION, self.fingerprint, self.top_k]

    def columns(self, rows: datasets.Dataset) -> pa.Table:
        """The teacher's columns of some rows."""
        import numpy as np
        import pyarrow as pa

        from prefrl.data.teacher_columns import TEACHER_COLUMNS, row_fingerprint

        texts = [([*row["given_ids"]], row["given_trainable"].index(True)) for row in rows]
        found = [self._top(batch) for batch in _batches(texts, self.max_tokens)]
        ids, logprobs, others = (np.concatenate(part) for part in zip(*found, strict=True))
        places = pa.array(np.arange(0, ids.size + 1, self.top_k), pa.int32())
        starts = pa.array(np.cumsum([0, *(len(tokens) - start for tokens, start in texts)]), pa.int32())
        flat = [pa.array(ids.ravel(), pa.int32()), pa.array(logprobs.ravel().astype(np.float16))]
        parts = [*(pa.ListArray.from_arrays(places, part) for part in flat), pa.array(others.astype(np.float16))]
        lists = [pa.ListArray.from_arrays(starts, part) for part in parts]
        marks = pa.array([row_fingerprint(self.fingerprint, tokens) for tokens, _ in texts])
        return pa.table(dict(zip(TEACHER_COLUMNS, [*lists, marks], strict=True)))

    def _top(self, texts: Sequence[tuple[list[int], int]]) -> list[Any]:
        """[N, k] ids, [N, k] log-probs and [N] log-probs of all others at the completions' tokens, in one pass."""
        import torch

        from prefrl.data.collate import flat_batch
        from prefrl.models.forward import inputs_of, verdict_of
        from prefrl.models.scoring import read_out

        prompts = [tokens[:start] for tokens, start in texts]
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        batch = flat_batch(prompts, [tokens[start:] for tokens, start in texts], groups=groups).to(self.model.device)
        verdict = verdict_of(self.model)
        inputs = inputs_of(self.model, batch, "auto", verdict)
        with torch.no_grad():
            found = read_out(self.model, inputs, inputs.predictors, self._likely, own_logits=verdict.own_logits)
        return [found[name].cpu().numpy() for name in ("ids", "logprobs", "others")]

    def _likely(self, model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
        """What is found likely at each position, from its hidden state, or from its logits."""
        import torch

        from prefrl.losses.logprobs import default_chunk_size
        from prefrl.models.scoring import head_logits, needed_head

        found = []
        for chunk in torch.split(rows, default_chunk_size(rows.device)):
            logits = chunk if request.own_logits else head_logits(model, needed_head(model), chunk)
            logits = logits.float() / self.fingerprint["temperature"]
            top = logits.topk(self.top_k)
            log_normalizers = logits.logsumexp(1)
            others = logits.scatter_(1, top.indices, -torch.inf).logsumexp(1) - log_normalizers
            found.append((top.indices, top.values - log_normalizers[:, None], others))
        names = ("ids", "logprobs", "others")
        return {name: torch.cat(part) for name, part in zip(names, zip(*found, strict=True), strict=True)}


def _batches(texts: Sequence[tuple[list[int], int]], max_tokens: int) -> Iterator[list[tuple[list[int], int]]]:
    """Rows in order, as many as fit in a pass; a longer one is alone."""
    batch: list[tuple[list[int], int]] = []
    count, prompts = 0, set[tuple[int, ...]]()
    for tokens, start in texts:
        prompt = tuple(tokens[:start])
        cost = len(tokens) - (start if prompt in prompts else 0)
        if batch and count + cost > max_tokens:
            yield batch
            batch, count, prompts, cost = [], 0, set(), len(tokens)
        batch.append((tokens, start))
        prompts.add(prompt)
        count += cost
    yield batch


@dataclass(frozen=True, slots=True)
class _Parts:
    """The folder of a run that is not finished."""

    output: Path
    bounds: list[tuple[int, int]]  # the rows of each part
    num_rows: int

    @classmethod
    def of(cls, output: Path, rows: datasets.Dataset, identity: Sequence[Any], *, top_k: int) -> _Parts:
        """Begin, or go on.

        Raises:
            ConfigError: The folder has parts of another run.
        """
        from prefrl.data.packing import list_lengths
        from prefrl.models.fingerprint import joint_digest, rows_fingerprint

        bounds, start, count = [], 0, 0
        lengths = list_lengths(rows, "given_ids")
        for row, length in enumerate(lengths.tolist()):
            count += length * top_k
            if count >= _VALUES_OF_A_PART or row == len(lengths) - 1:
                bounds.append((start, row + 1))
                start, count = row + 1, 0
        parts = cls(output, bounds, len(rows))
        digest = joint_digest([*identity, rows_fingerprint(rows, ["given_ids", "given_trainable"])])
        mark = parts.folder / _RUN
        if not mark.exists():
            parts.folder.mkdir(exist_ok=True)
            aside = mark.with_suffix(".part")  # a kill leaves the mark whole, or none
            aside.write_text(json.dumps({"digest": digest}), encoding="utf-8")
            aside.replace(mark)
        elif json.loads(mark.read_text(encoding="utf-8")).get("digest") != digest:
            raise ConfigError(
                f"output_file={str(output)!r}: {parts.folder} has parts of a run that was stopped and had another "
                "model, dataset or option. Remove the folder, or choose another output_file."
            )
        return parts

    @property
    def folder(self) -> Path:
        """Beside the output."""
        return self.output.with_name(f"{self.output.name}.parts")

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"{number:06d}.parquet"

    def tell(self, console: Console) -> None:
        """Say what is there already."""
        done = sum(stop - start for number, (start, stop) in enumerate(self.bounds) if self.path(number).exists())
        if done:
            console.print(
                f"{done:,} of {self.num_rows:,} rows are there from a run that was stopped.", highlight=False
            )

    def write(self, number: int, table: pa.Table) -> None:
        """Write a part, whole or not at all."""
        import pyarrow.parquet as pq

        unfinished = self.folder / "unfinished"
        pq.write_table(table, unfinished, compression="zstd")
        unfinished.replace(self.path(number))

    def join(self, dataset: datasets.Dataset) -> int:
        """Write the output from all parts and the dataset's own columns. Returns the number of completions' tokens."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        from prefrl.data.teacher_columns import IDS

        unfinished, writer, count = self.folder / "unfinished", None, 0
        own = dataset.with_format("arrow")
        for number, (start, stop) in enumerate(self.bounds):
            columns = pq.read_table(self.path(number))
            count += pc.sum(pc.list_value_length(columns[IDS])).as_py()
            table = own[start:stop]
            for name in columns.column_names:
                table = table.append_column(name, columns[name])
            if writer is None:
                writer = pq.ParquetWriter(unfinished, table.schema.remove_metadata(), compression="zstd")
            writer.write_table(table.replace_schema_metadata(None))
        assert writer is not None
        writer.close()
        unfinished.replace(self.output)
        shutil.rmtree(self.folder)
        return count
