"""`prefrl play`: an episode of an environment, turn by turn, by hand or with a model.

What is played is what is trained on: the options are those of the algorithm, and the code is that of its episodes.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge
from rich.console import Console

from prefrl.errors import ConfigError, EpisodeError
from prefrl.options.fields import check_unset, opt
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY, Algorithm, uncollected
from prefrl.scripts.arguments.command import Given, RewardArguments
from prefrl.scripts.inputs import check_files, datasets_of, options_of
from prefrl.scripts.parsing.option_parser import EarlyParser
from prefrl.scripts.schema import SchemaParser, option_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefrl.data.tools import Schema
    from prefrl.generation.base import TurnSampler
    from prefrl.generation.local.turns import TurnRequest
    from prefrl.rollout.episodes.driver import EpisodeSampler
    from prefrl.rollout.episodes.play import Played
    from prefrl.types import Completion, Episode

_USAGE = "prefrl play [ENVIRONMENT] [FILE.yaml] [--model MODEL] [--option value ...]"
_ABOUT = """\
Play an episode of an environment, turn by turn: by hand, or with a model. By hand, type what the assistant says, or a
call such as open(number=3). End a line with \\ to go on in the next one; Ctrl-D ends the episode. All options of
prefrl grpo are options of prefrl play, too; prefrl play ppo run.yaml takes those of another algorithm.

Examples:
  prefrl play my_env.py:Game                   # you play
  prefrl play my_env.py:Game --model MODEL     # the model plays
  prefrl play run.yaml --row 3                 # what prefrl grpo run.yaml would play with row 3 of its dataset
  prefrl play run.yaml --model runs/game       # the same with the trained model
"""
_GENERAL = (
    {"name": "help", "kind": "[WORD]", "help": "Show this help; with a word, the options that contain it."},
    {"name": "help_all", "kind": "", "help": "Show every option."},
)


@dataclass
class PlayArguments(RewardArguments):
    """What is played, and by whom."""

    own: ClassVar[tuple[str, ...]] = ("environment", "agent", "tools", "prompt", "row", "num_episodes", "by_hand")

    model_name_or_path: str = field(
        default="", kw_only=True, metadata={"help": "Model or adapter that plays. Without one, you play."}
    )
    prompt: str | None = opt(None, "What the user says first, instead of a row of a dataset.")
    row: Annotated[int, Ge(0)] = opt(0, "Row of the dataset, counted from 0.")
    num_episodes: Annotated[int, Ge(1)] = opt(1, "Number of episodes, which differ in their seeds.")
    by_hand: bool = opt(False, "Play by hand even if a model is given; its chat template and tokenizer are used.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_episodes:
            raise ConfigError(f"environment, agent, tools: not given, so there is nothing to play. {_USAGE}")
        has_rows = self.dataset_name is not None or bool(self.datasets)
        if self.prompt is not None or not has_rows:
            because = "there is no dataset" if self.prompt is None else "prompt is set"
            check_unset(self, "row", because=because, remedy="Set dataset_name, without prompt.")
        if not (self.environment or self.agent or has_rows or self.prompt):
            raise ConfigError("prompt: not given. With tools alone, set prompt, or dataset_name.")

    @property
    def is_by_hand(self) -> bool:
        """Whether the user plays."""
        return self.by_hand or not self.model_name_or_path

    @property
    def needs_dataset(self) -> bool:
        """See `CommandArguments`."""
        return False

    @property
    def lacks_reward(self) -> bool:
        """See `RewardArguments`. Nothing is trained."""
        return False


class _Parser(SchemaParser):
    """The options of an algorithm, of which none has to be given."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(algorithm, PlayArguments)

    def show_help(self, argv: Sequence[str], early: EarlyParser) -> None:
        """Print its own options, or what the algorithm's help prints."""
        if early.word or early.wants_all:
            super().show_help(argv, early)
            return
        own = [self._options[name] for name in ("model_name_or_path", *PlayArguments.own)]
        print(f"usage: {_USAGE}\n\n{_ABOUT}\n{option_group('Options', own)}\n\n{option_group('General', _GENERAL)}")


def main(argv: Sequence[str]) -> int:
    """Play.

    Args:
        argv: The words after `prefrl play`.

    Returns:
        The exit code.

    Raises:
        PrefrlError: The options ask for something that cannot work, or the environment failed.
    """
    algorithm, words = _words(argv)
    parser = _Parser(algorithm.name)
    given = parser.parse(words)
    if "max_steps" not in given.values:  # training needs it for an environment without a dataset
        given = dataclasses.replace(given, values={**given.values, "max_steps": 1})
    check_files(given)
    parser.check(given, knows_processes=False)
    console = Console(highlight=False)
    with uncollected(), given.locating():
        table = _Table(algorithm, given, console)
    rewards = []
    try:
        for number in range(table.script.num_episodes):
            console.rule(f"episode {number + 1} of {table.script.num_episodes}", align="left", characters="-")
            rewards.append(table.play(number))
        if len(rewards) > 1:
            console.print(f"mean reward of {len(rewards)} episodes: {sum(rewards) / len(rewards):g}")
    except EOFError:
        console.print("\nended by you")
    finally:
        table.close()
    return 0


def _words(argv: Sequence[str]) -> tuple[Algorithm, list[str]]:
    """The algorithm, and its command line."""
    start = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    name, options = "grpo", list[str]()
    for word in argv[:start]:
        if word in REGISTRY:
            name = word
        else:
            options += ["--config" if word.endswith((".yaml", ".yml")) else "--environment", word]
    options += [re.sub(r"^--model(?==|$)", "--model_name_or_path", word) for word in argv[start:]]
    online = [row.name for row in REGISTRY.values() if hasattr(row.load_options(), "reward_weights")]
    if name not in online:
        raise ConfigError(f"{name}: has no episodes. {nearest(name, online)}")
    return REGISTRY[name], options


class _Table:
    """Where episodes are played: prompt, environment and player.

    Args:
        algorithm: Its options are read.
        given: Options, from the command line.
        console: For what is shown.

    Raises:
        PrefrlError: The options ask for something that cannot work.
    """

    def __init__(self, algorithm: Algorithm, given: Given, console: Console) -> None:
        import datasets

        from prefrl.rewards.named import reward_by_name
        from prefrl.rewards.runner import RewardRunner
        from prefrl.trainer.online.prompts import tokenized_prompts
        from prefrl.trainer.online.sampling import Episodes

        datasets.disable_progress_bars()
        script, config = options_of(algorithm, given, num_processes=given.values.get("num_processes"))
        assert isinstance(script, PlayArguments)
        self.script, self._config, self._console = script, config, console
        self._episodes = Episodes(config, **script.loaded(), option="environment")
        kinds = self._episodes.kinds.values()
        self._schemas = {name: one for kind in kinds for name, one in kind.schemas.items()}
        tokenizer, self._turns, self._sampler = self._player()
        dataset = self._episodes.training_prompts(_chosen(script, config), num_rows=1)
        (self._row,) = tokenized_prompts(dataset, tokenizer, config, tools=self._episodes.schemas)
        names: list[Any] = [reward_by_name(name) for name in script.reward_funcs or ()]
        names += [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
        environments = self._episodes.rewards
        self._rewards = (
            RewardRunner(names, weights=config.reward_weights, environments=environments) if names else None
        )

    def _player(self) -> tuple[PreTrainedTokenizerBase, TurnSampler, EpisodeSampler]:
        """Tokenizer, who plays, and what knows the environments."""
        from prefrl.generation.local.generator import LocalGenerator
        from prefrl.generation.local.turns import LocalTurns

        script, config = self.script, self._config
        if not script.is_by_hand:
            model, tokenizer = _loaded(script, config)
            generator = LocalGenerator(model, tokenizer=tokenizer)
            sampler: Any = self._episodes.sampler(tokenizer, lambda: generator)
            return tokenizer, generator.turns(config.sampling_params()), sampler
        if script.model_name_or_path:
            _, tokenizer = _loaded(script, config)
        else:
            tokenizer = _plain_tokenizer()
            config.max_prompt_length, config.max_completion_length = None, sys.maxsize  # tokens are bytes here
        config.tool_parser = lambda text: _message(text, str(tokenizer.eos_token), self._schemas)
        config.episode_timeout = None
        hand: Any = _Hand(self._console, tokenizer)
        sampler = self._episodes.sampler(tokenizer, lambda: hand)
        return tokenizer, LocalTurns(hand.type), sampler

    def play(self, number: int) -> float:
        """Play an episode, and show it.

        Args:
            number: Which one; they differ in their seeds.

        Returns:
            Its reward.

        Raises:
            EOFError: The user does not go on.
            EpisodeError: The environment failed.
        """
        from prefrl.generation.base import Home
        from prefrl.rollout.collect import prompt_seed
        from prefrl.rollout.episodes.agent import AgentPlayer
        from prefrl.rollout.episodes.driver import seed_of
        from prefrl.rollout.episodes.play import EnvironmentFailure
        from prefrl.scripts.episode_view import EpisodeView

        script, seed = self.script, seed_of(prompt_seed(self._config.seed, 0, 0), number)
        is_typed = script.is_by_hand and _is_interactive(self._console)
        view = EpisodeView(self._console, has_tokens=bool(script.model_name_or_path), is_typed=is_typed)
        player: Any = None

        async def sample(token_ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
            view.show(player, token_ids)
            if isinstance(player, AgentPlayer) and player.session is not None and player.session.asked is not None:
                self._schemas = {tool["function"]["name"]: tool for tool in player.session.asked.tools}
            answer = self._turns.ask(token_ids, max_tokens=max_tokens, seed=seed, home=Home())
            return await asyncio.wrap_future(answer)

        async def played() -> Episode:
            nonlocal player
            player = self._sampler.player(self._row, seed, sample)
            view.begin(player)
            episode: Episode = await player.play()
            return episode

        work: Future[Episode] = self._sampler.submit(played())
        try:
            self._wait(work)
            episode = work.result()
        except EnvironmentFailure as error:
            raise EpisodeError(f"{error}{_place_of(error.__cause__)}") from error
        finally:
            work.cancel()
        view.show(player, None)
        scores = self._scored(player.played, episode)
        total = view.end(player.played, episode, scores)
        self._sampler.submit(self._sampler.give_back([player.seat]))
        return total

    def _wait(self, work: Future[Episode]) -> None:
        """Answer the requests of the episode until it is over."""
        self._sampler.main_thread.wake = self._turns.notify
        work.add_done_callback(lambda _: self._turns.notify())
        self._turns.serve(_One(work, self._sampler.main_thread.attend))

    def _scored(self, played: Played, episode: Episode) -> dict[str, tuple[float | None, float]]:
        """The reward functions' values, and the environment's, with their weights."""
        if self._rewards is None:
            return {} if episode.reward is None else {episode.kind: (episode.reward, 1.0)}
        columns = {name: [value] for name, value in self._row.items() if name not in ("prompt", "prompt_ids")}
        ids = [token for turn in played.turns for token in turn.completion.token_ids]
        found = self._rewards.score([played.prompt], [played.said], [ids], columns, episodes=[episode]).by_name
        return {name: (found[name][0], weight) for name, weight in zip(found, self._rewards.weights, strict=True)}

    def close(self) -> None:
        """Close the environments."""
        self._sampler.close()


def _chosen(script: PlayArguments, config: Any) -> Any:
    """The row that is played, as a dataset; None: the environment brings the prompt.

    Raises:
        ConfigError: The dataset does not have it.
    """
    import datasets

    if script.prompt is not None:
        return datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": script.prompt}]}])
    found = datasets_of(script, config)[0]
    if isinstance(found, datasets.IterableDataset):
        return datasets.Dataset.from_list(list(found.skip(script.row).take(1)))
    if found is not None and script.row >= len(found):
        raise ConfigError(f"row={script.row}: the dataset has the rows 0 to {len(found) - 1}")
    return None if found is None else found.select([script.row])


def _loaded(
    script: PlayArguments, config: Any, *, only_tokenizer: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model, or only its outline, and its tokenizer with the changes that the options ask for."""
    from prefrl.models.export import is_adapter, load_merged, saved_tokenizer
    from prefrl.models.footprint import outline_of
    from prefrl.models.load import load_model, load_tokenizer
    from prefrl.models.plans import position_limit

    name, arguments = script.model_name_or_path, config.model_init_kwargs
    if is_adapter(name):
        model = load_merged(name, dtype=script.dtype)
    else:
        model = (outline_of if script.is_by_hand else load_model)(name, model_init_kwargs=arguments)
    saved = saved_tokenizer(name) if is_adapter(name) else None
    tokenizer = load_tokenizer(model, saved, model_init_kwargs=arguments, changes=config.tokenizer_changes)
    config.fit_context(position_limit(model))
    return (model if script.is_by_hand else model.eval().to(config.device)), tokenizer


@dataclass
class _One:
    """The `prefrl.generation.base.Conversations` of a single episode."""

    work: Future[Any]
    attend: Callable[[], None]

    def has_news(self) -> bool:
        """See `Conversations`."""
        return False

    def is_over(self) -> bool:
        """See `Conversations`."""
        return self.work.done()

    def is_waiting(self) -> bool:
        """See `Conversations`."""
        return True


class _Hand:
    """The user, in the place of a generator."""

    context_limit = None

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self._console, self._tokenizer = console, tokenizer

    def type(self, requests: Sequence[TurnRequest]) -> list[Completion]:
        """What the user types as the turns that are asked for.

        Raises:
            EOFError: The input has ended.
        """
        from prefrl.types import Completion

        (request,) = requests
        text = self._line()
        while not text.strip() or text.endswith("\\"):
            text = text.removesuffix("\\") + ("\n" if text.strip() else "") + self._line()
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        reason: Any = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        count = len(ids)
        return [Completion(ids, reason, [0.0] * count, [True] * count, [0] * count)]

    def _line(self) -> str:
        is_asked = _is_interactive(self._console)
        return self._console.input("[bold green]assistant>[/bold green] " if is_asked else "")


def _is_interactive(console: Console) -> bool:
    return sys.stdin.isatty() and console.is_terminal


_CALL = re.compile(r"\s*\w+\(.*\)\s*", re.S)


def _message(text: str, end: str, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """What the user typed as a message: each line such as open(number=3) is a call of a tool.

    Raises:
        ValueError: A call cannot be read.
    """
    calls, lines = [], []
    for line in text.removesuffix(end).splitlines():
        if not (schemas and _CALL.fullmatch(line)):
            lines.append(line)
            continue
        node = ast.parse(line.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("a call is written as name(argument=value)")
        schema = schemas.get(node.func.id, {"function": {}})["function"]
        names = list((schema.get("parameters") or {}).get("properties") or {})
        given = [*zip(names, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
        arguments = {str(name): ast.literal_eval(value) for name, value in given}
        calls.append({"type": "function", "function": {"name": node.func.id, "arguments": arguments}})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(lines).strip()}
    return {**message, "tool_calls": calls} if calls else message


_TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def _plain_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes, for episodes without a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<start>", "<end>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=special[:1],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _place_of(error: BaseException | None) -> str:
    """The last line of code that an error went through."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
