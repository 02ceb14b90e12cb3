"""`prefrl generate` and `chat`, and what `eval` samples with, too: of a model in this process, of a server, of a file.

`prefrl generate` writes files of rows with responses, which `prefrl eval` reads.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le
from rich.console import Console
from rich.markup import escape

from prefrl.errors import ConfigError, DataError, GenerationError, printable
from prefrl.options.fields import check_fields, check_unset, opt
from prefrl.options.names import nearest
from prefrl.run.folder import check_writable
from prefrl.scripts.arguments.datasets import FILES, SHAPING, ColumnArguments, DatasetConfig, load_part
from prefrl.scripts.arguments.model_config import DType
from prefrl.scripts.declaration import command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefrl.generation.base import SamplingParams
    from prefrl.http import Http

TextOrMessages = str | list[dict[str, Any]]

REQUEST_SECONDS, _REQUESTS_AT_ONCE, _ANSWER_BYTES = 600.0, 32, 2**26
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass
class SamplingArguments:
    """The model, and how completions are sampled."""

    GROUP: ClassVar[str] = "Model and sampling"

    model_name_or_path: str | None = opt(
        None,
        "Folder of a model or an adapter, or its name on the Hub. With a server, this is the model's name there; the "
        "default is its first model.",
    )
    server: str | None = opt(
        None,
        "URL of a server with an OpenAI-compatible API to sample from instead, such as http://localhost:8000/v1. The "
        "key is read from VLLM_API_KEY or, for a server on this machine, from the key file of prefrl vllm-serve.",
    )
    num_generations: Annotated[int, Ge(1)] = opt(1, "Completions per prompt.")
    max_completion_length: Annotated[int, Ge(1)] = opt(512, "Maximum length of a completion in tokens.")
    temperature: Annotated[float, Ge(0)] | None = opt(
        None,
        "Sampling temperature, where 0 decodes greedily. The default is 0 for one completion per prompt, and 1 "
        "for several.",
    )
    top_p: Annotated[float, Gt(0), Le(1)] = opt(
        1.0, "Sample from the smallest set of most likely tokens with this total probability."
    )
    top_k: Annotated[int, Ge(0)] = opt(0, "Sample from this many of the most likely tokens. 0 means all tokens.")
    stop: list[str] | None = opt(
        None, "Strings that end a completion. The text of the completion ends with the string, as in training."
    )
    seed: Annotated[int, Ge(0)] = opt(0, "Seed for sampling. The same seed gives the same completions.")
    batch_size: Annotated[int, Ge(1)] = opt(
        64, "Number of completions that are decoded together in this process. 1 needs the least memory."
    )
    dtype: DType = opt("auto", "Data type of the weights. 'auto' takes that of the files.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stop is not None and not all(self.stop or [""]):
            raise ConfigError(f"stop={self.stop!r}: must be one or more strings that are not empty")
        if self.server is not None:
            remedy = "Leave it out: the server decides."
            check_unset(self, "batch_size", "dtype", because="server is set", remedy=remedy)
            address = urlsplit(self.server)
            if address.scheme not in ("http", "https") or not address.hostname:
                raise ConfigError(f"server={self.server!r}: must be a URL such as http://localhost:8000/v1")

    def params(self) -> SamplingParams:
        """The sampling parameters."""
        from prefrl.generation.base import SamplingParams

        default = 0.0 if self.num_generations == 1 else 1.0
        return SamplingParams(
            num_samples=self.num_generations,
            max_tokens=self.max_completion_length,
            temperature=default if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            stop=tuple(self.stop or ()),
        )


@dataclass(frozen=True, slots=True)
class SampledText:
    """A completion as text."""

    text: str
    finish_reason: str  # "stop", "stop_string", or "length" if it was cut off
    token_ids: list[int] | None  # None: the server does not tell


class Sampler(Protocol):
    """Samples completions of prompts."""

    def sample(self, prompts: Sequence[TextOrMessages]) -> list[list[SampledText]]:
        """[P][G] completions of texts or conversations; they depend on the place of a prompt only by its seed."""
        ...


def has_messages(prompts: Sequence[TextOrMessages]) -> bool:
    """Whether prompts need a chat template."""
    return not all(isinstance(prompt, str) for prompt in prompts)


def make_sampler(options: SamplingArguments, *, needs_template: bool) -> Sampler:
    """The model, or the connection to the server, that the options name.

    Raises:
        ConfigError: There is no such model, the server has none, or the model has no chat template and needs one.
        GenerationError: The server cannot be reached.
    """
    if options.server is not None:
        return Server(options)
    if options.model_name_or_path is None:
        raise ConfigError("model_name_or_path: not given. Set it to a model, or set server to the URL of a server.")
    return Local(options, options.model_name_or_path, needs_template=needs_template)


class Local:
    """A model in this process; an adapter is merged into it."""

    def __init__(self, options: SamplingArguments, name: str, *, needs_template: bool) -> None:
        import torch

        from prefrl.generation.local.generator import LocalGenerator
        from prefrl.models.export import load_merged, saved_tokenizer, tokenizer_of_checkpoint

        self._options = options
        if needs_template and (saved := saved_tokenizer(name)) is not None:
            _check_template(saved, name)
        self.model = model = load_merged(name, dtype=options.dtype).eval()
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        self.tokenizer = tokenizer_of_checkpoint(name, model)
        if needs_template:
            _check_template(self.tokenizer, name)
        self.generator = LocalGenerator(model, tokenizer=self.tokenizer, max_rows=options.batch_size)

    def sample(self, prompts: Sequence[TextOrMessages]) -> list[list[SampledText]]:
        """See `Sampler`."""
        import datasets

        from prefrl.data.tokenize import decoded_completion, prepare_prompt_dataset
        from prefrl.rollout.collect import prompt_seed

        if not prompts:
            return []
        rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        with _without_bars():
            prompt_ids = prepare_prompt_dataset(rows, self.tokenizer, max_prompt_length=None)["prompt_ids"]
        seeds = [prompt_seed(self._options.seed, 0, number) for number in range(len(prompts))]
        completions = self.generator.generate([*prompt_ids], self._options.params(), seeds=seeds)
        texts = [[str(decoded_completion(self.tokenizer, c.token_ids, False)) for c in group] for group in completions]
        return [
            [SampledText(text, c.finish_reason, c.token_ids) for text, c in zip(of_prompt, group, strict=True)]
            for of_prompt, group in zip(texts, completions, strict=True)
        ]


def _check_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"model_name_or_path={name!r}: the model has no chat template, so it only continues texts. Write "
            'prefrl generate MODEL "..." --raw, or give a dataset of texts.'
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar of datasets, which a chat would show for every question."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, options: SamplingArguments) -> None:
        from prefrl.generation.server import KEY_VARIABLE, key_of_user
        from prefrl.http import Http

        self._options = options
        self.url = str(options.server).rstrip("/")
        is_here = urlsplit(self.url).hostname in LOOPBACK
        # The file's key is for servers of this machine; another machine has another file.
        self.http: Http = Http(key=key_of_user(os.environ) if is_here else os.environ.get(KEY_VARIABLE))
        self._model = options.model_name_or_path or str(self.first_model()["id"])

    def sample(self, prompts: Sequence[TextOrMessages]) -> list[list[SampledText]]:
        """See `Sampler`."""
        from prefrl.http import HttpError

        try:
            return self.http.submit(self._sample_all(prompts)).result()
        except HttpError as error:
            raise GenerationError(f"server={self.url!r}: {error}") from error

    async def _sample_all(self, prompts: Sequence[TextOrMessages]) -> list[list[SampledText]]:
        slots = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        return list(await asyncio.gather(*(self._sample(slots, i, prompt) for i, prompt in enumerate(prompts))))

    async def _sample(self, slots: asyncio.Semaphore, number: int, prompt: TextOrMessages) -> list[SampledText]:
        from prefrl.rollout.collect import prompt_seed

        params = self._options.params()
        body: dict[str, Any] = {
            "model": self._model,
            "n": params.num_samples,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": prompt_seed(self._options.seed, 0, number) % 2**31,
        }
        if params.top_k:
            body["top_k"] = params.top_k  # vLLM knows it, others refuse it
        if params.stop:
            body["stop"] = list(params.stop)
        is_text = isinstance(prompt, str)
        route = "completions" if is_text else "chat/completions"
        asked = {**body, ("prompt" if is_text else "messages"): prompt}
        async with slots:
            answer = await self.http.send(
                "POST", f"{self.url}/{route}", timeout=REQUEST_SECONDS, json=asked, max_bytes=_ANSWER_BYTES
            )
        return [self._sample_of(choice) for choice in self._choices(answer, params.num_samples)]

    def _choices(self, answer: Any, count: int) -> list[Any]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != count:
            raise GenerationError(f"server={self.url!r}: its answer does not have {count} choices: {answer!r:.300}")
        return choices

    def _sample_of(self, choice: Any) -> SampledText:
        text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
        reason = str(choice.get("finish_reason"))
        if not self._options.stop or reason != "stop":
            return SampledText(text, reason, None)
        if "stop_reason" not in choice:  # with which vLLM says which string the text lacks, or that it lacks none
            raise GenerationError(
                f"server={self.url!r}: does not say which string of stop={self._options.stop} ended a completion "
                "(stop_reason), so its text would lack the end. Remove stop, or use a server of vLLM."
            )
        if choice["stop_reason"] not in self._options.stop:
            return SampledText(text, reason, None)
        return SampledText(text + choice["stop_reason"], "stop_string", None)

    def first_model(self) -> dict[str, Any]:
        """What the server says of its first model: `id`, and more if it is vLLM."""
        from prefrl.http import HttpError

        try:
            answer = self.http.request("GET", f"{self.url}/models", timeout=REQUEST_SECONDS)
        except HttpError as error:
            raise GenerationError(
                f"server={self.url!r}: {error}. Is it running, does the URL end in /v1, and is VLLM_API_KEY its key?"
            ) from error
        try:
            return {"id": answer["data"][0]["id"], **answer["data"][0]}
        except (TypeError, KeyError, IndexError) as error:
            raise ConfigError(
                f"server={self.url!r}: lists no model: {answer!r:.300}. Set model_name_or_path."
            ) from error


RESPONSES = "responses"  # the column of a file that holds the responses of each row
_SUFFIXES = (".jsonl", ".parquet")


def load_rows(
    dataset: str, split: str | None, *, column: str, options: ColumnArguments | None = None
) -> list[dict[str, Any]]:
    """The rows of a dataset.

    Args:
        dataset: A name on the Hub, a folder or a file.
        split: Its split; None: the whole of a file, otherwise "test".
        column: A column that it must have.
        options: What to make of its columns before.

    Raises:
        DataError: It cannot be loaded, is empty, or lacks the column.
    """
    split = split or ("train" if Path(dataset).is_file() else "test")
    shaping: dict[str, Any] = {} if options is None else {name: getattr(options, name) for name in SHAPING}
    loaded: Any = load_part(
        DatasetConfig(path=dataset, split=split, **shaping),
        streaming=False,
        path_option="dataset_name",
        split_option="dataset_split",
    )
    if column not in loaded.column_names:
        remedy = nearest(column, loaded.column_names)
        raise DataError(f"dataset_name={dataset!r}: has no column {column!r}. {remedy}")
    rows: list[dict[str, Any]] = loaded.to_list()
    if not rows:
        raise DataError(f"dataset_name={dataset!r} with dataset_split={split!r}: has no rows")
    return rows


def check_output_file(option: str, path: str) -> None:
    """Refuse a name that does not say what kind of file it is.

    Raises:
        ConfigError: It ends neither in .jsonl nor in .parquet.
    """
    if not path.endswith(_SUFFIXES):
        raise ConfigError(f"{option}={path!r}: must end in {' or '.join(_SUFFIXES)}")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines or parquet, as the name of the file says.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(list(rows)), path)
            return
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error


@dataclass
class GenerateArguments(SamplingArguments, ColumnArguments):
    """The prompts, and where the completions go."""

    GROUP: ClassVar[str] = "Prompts and output"

    prompt: str | None = opt(None, "Prompt to complete. Set this or dataset_name.")
    system: str | None = opt(None, "System prompt that goes with prompt.")
    raw: bool = opt(False, "Continue the text of prompt directly, without the chat template.")
    dataset_name: str | None = opt(None, f"Dataset with the prompts: a name on the Hub, a folder, or {FILES}.")
    dataset_split: str | None = opt(
        None, "Split, such as test[:100]. The default is all of a file, and otherwise test."
    )
    prompt_column: str = opt("prompt", "Column with the prompts, which are texts or lists of messages.")
    output_file: str | None = opt(
        None, f"File to write the rows to, with a column {RESPONSES}. It must end in .jsonl or .parquet."
    )

    def __post_init__(self) -> None:
        for part in (SamplingArguments, ColumnArguments):
            part.__post_init__(self)
        if (self.prompt is None) == (self.dataset_name is None):
            given = "both are given" if self.prompt is not None else "not given"
            raise ConfigError(f'prompt, dataset_name: {given}. Write prefrl generate MODEL "..." or set dataset_name.')
        if self.dataset_name is None:
            names = ("dataset_split", "prompt_column", "output_file", *SHAPING)
            check_unset(self, *names, because="dataset_name is not set", remedy="Set dataset_name.")
            if self.raw:
                check_unset(self, "system", because="raw=True", remedy="Write it in the prompt.")
            return
        remedy = "system_prompt and conversational are the options for datasets."
        check_unset(self, "system", "raw", because="dataset_name is set", remedy=remedy)
        if self.output_file is None:
            raise ConfigError("output_file: not given. Set it to a .jsonl or .parquet file for the completions.")
        check_output_file("output_file", self.output_file)

    def messages(self) -> TextOrMessages:
        """The prompt as a conversation, or as text."""
        assert self.prompt is not None
        if self.raw:
            return self.prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


@command(
    "generate",
    GenerateArguments,
    about="Sample completions of a prompt, or of all prompts of a dataset.\n\nExamples:\n"
    '  prefrl generate runs/first "What is 2 + 3?" --num_generations 4\n'
    "  prefrl generate runs/first --dataset_name questions.jsonl --output_file answers.jsonl",
    positional=("model_name_or_path", "prompt"),
)
def generate(options: GenerateArguments) -> int:
    """Sample, and print or write the completions."""
    if options.dataset_name is None:
        return _print(options)
    output, column = Path(str(options.output_file)), options.prompt_column
    rows = load_rows(options.dataset_name, options.dataset_split, column=column, options=options)
    check_writable(output.parent, option="folder of output_file")
    prompts = [row[options.prompt_column] for row in rows]
    samples = make_sampler(options, needs_template=has_messages(prompts)).sample(prompts)
    answered = [{**row, RESPONSES: [one.text for one in group]} for row, group in zip(rows, samples, strict=True)]
    write_rows(output, answered)
    print(f"{len(rows)} prompts with {options.num_generations} completions each are in {options.output_file}.")
    print(f"To score them: prefrl eval --dataset_name {options.output_file} --reward_funcs NAME")
    return 0


def _print(options: GenerateArguments) -> int:
    prompts = [options.messages()]
    (samples,) = make_sampler(options, needs_template=has_messages(prompts)).sample(prompts)
    console = Console(highlight=False)
    for number, sample in enumerate(samples):
        if len(samples) > 1:
            console.rule(f"{number + 1} of {len(samples)}")
        console.print(escape(printable(sample.text)), soft_wrap=True)
        if sample.finish_reason == "length":
            console.print(f"[dim](cut off after max_completion_length={options.max_completion_length} tokens)[/dim]")
    return 0


_COMMANDS = "/clear forgets the conversation, /undo its last turn; /exit or Ctrl-D ends."


@dataclass
class ChatArguments(SamplingArguments):
    """The model, and what it is told first."""

    num_generations: int = field(default=1, init=False)  # no option of a chat: each question has one answer
    system: str | None = opt(None, "System prompt of the conversation.")


@command(
    "chat",
    ChatArguments,
    about=f"Talk to a model in the terminal. {_COMMANDS}\n\nExample:\n  prefrl chat runs/first",
    positional=("model_name_or_path",),
)
def chat(options: ChatArguments) -> int:
    """Talk until the input ends."""
    console = Console(highlight=False)
    with console.status("Loading the model"):
        sampler = make_sampler(options, needs_template=True)
    console.print(f"[dim]{_COMMANDS}[/dim]")
    _talk(sampler, options, console)
    return 0


def _talk(sampler: Sampler, options: ChatArguments, console: Console) -> None:
    opening: list[dict[str, Any]] = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(opening)
    for text in _lines(console):
        if text == "/clear":
            messages = list(opening)
            continue
        if text == "/undo":
            messages = messages[: max(len(opening), len(messages) - 2)]
            continue
        asked = [*messages, {"role": "user", "content": text}]
        with console.status("..."):
            ((answer,),) = sampler.sample([asked])
        console.print(f"[bold green]model>[/bold green] {escape(printable(answer.text))}", soft_wrap=True)
        if answer.finish_reason == "length":
            console.print(f"[dim](cut off after max_completion_length={options.max_completion_length} tokens)[/dim]")
        messages = [*asked, {"role": "assistant", "content": answer.text}]


def _lines(console: Console) -> Iterator[str]:
    """What the user types, until the end."""
    while True:
        try:
            text = console.input("[bold blue]you>[/bold blue] ").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text:
            yield text
