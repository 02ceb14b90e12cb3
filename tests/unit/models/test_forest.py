"""Rows with several responses on a forest of prompts: the numbers of transformers on every response alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefrl.data import collate
from prefrl.data.collate import flat_batch
from prefrl.models.flops import ModelCost, Products, floor_flops
from prefrl.models.forward import in_pieces, token_logprobs
from prefrl.models.plans import ForwardPlan, PositionLimit, lay_out, part_of, position_limit
from prefrl.trainer.online.minibatches import _cost
from prefrl.types import TokenBatch
from tests.assets import ragged_batch, tiny_model
from tests.unit.models.test_attention import visible_positions

PLANS = ["shared_prefix", "packed", "padded"]
MODELS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("gpt2", {}, id="gpt2-learned-positions"),
    pytest.param("mistral", {"sliding_window": 24}, id="mistral-window-24"),
    pytest.param("gemma3_text", {"sliding_window": 7}, id="gemma3-window-7-in-some-layers"),
]
# Of kernels: episodes with every model, and groups with one of full and one of sliding attention.
RUNS = [
    pytest.param(name, *model.values, id=f"{name}-{model.id}")
    for name, models in (("edited", MODELS), ("group", MODELS[::2]))
    for model in models
]


@dataclass(frozen=True)
class Turns:
    """Requests: what was sent, what came back, and the episode and the group of each."""

    contexts: list[list[int]]
    responses: list[list[int]]
    rows: list[int]
    groups: list[int]

    @property
    def batch(self) -> TokenBatch:
        return flat_batch(self.contexts, self.responses, groups=self.groups, rows=self.rows)


class Drawn:
    """Random tokens."""

    def __init__(self) -> None:
        self._numbers = random.Random(0)

    def __call__(self, count: int) -> list[int]:
        return [self._numbers.randrange(2, 128) for _ in range(count)]


def stripped_thinking(num_turns: int = 10) -> Turns:
    """Of each answer, later turns see the answer without its thinking."""
    draw = Drawn()
    history = draw(100)
    contexts, responses = [], []
    for _ in range(num_turns):
        answer = draw(10)
        contexts.append(history)
        responses.append(draw(40) + answer)
        history = history + answer + draw(20)
    return Turns(contexts, responses, [0] * num_turns, [0])


def edited_history() -> Turns:
    """In the middle, the second observation is replaced, then the whole beginning; one response has one token."""
    draw = Drawn()
    prompt, answers, observations = draw(9), [draw(n) for n in (6, 1, 8, 5, 3)], [draw(n) for n in (4, 7, 20, 2)]
    first = prompt + answers[0] + observations[0]
    second = first + answers[1] + observations[1]
    edited = first + answers[1] + observations[2]
    contexts = [prompt, first, second, edited, edited + answers[3] + observations[3], draw(5)]
    return Turns(contexts, [*answers, draw(4)], [0] * 6, [0])


def group_of_episodes() -> Turns:
    """Two groups of ragged episodes: all of a group begin with one prompt, and two of them go on alike for a while."""
    draw = Drawn()
    turns = Turns([], [], [], [0, 0, 0, 1, 1])
    for episodes in ((0, 1, 2), (3, 4)):
        prompt, alike = draw(12), draw(collate._SHORTEST_SHARED)
        for row in episodes:
            history = prompt
            for turn in range(1 + row % 3):
                turns.contexts.append(history)
                turns.responses.append(draw(3 + row))
                turns.rows.append(row)
                history = history + (alike if turn == 0 else []) + turns.responses[-1] + draw(5)
    return turns


EPISODES = {"stripped": stripped_thinking(), "edited": edited_history(), "group": group_of_episodes()}


def weighted(logprobs: torch.Tensor) -> torch.Tensor:
    """A sum in which every token has its own weight."""
    return (logprobs * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))).sum()


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def numbers(model, turns: Turns, plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their weighted sum."""
    logprobs = token_logprobs(model, turns.batch, plan=plan).logprobs
    return logprobs.detach(), gradient(model, weighted(logprobs))


def alone(model, turns: Turns) -> torch.Tensor:
    """[N] from transformers' forward on every response after its context."""
    found = []
    for context, response in zip(turns.contexts, turns.responses, strict=True):
        logits = model(input_ids=torch.tensor([context + response])).logits[0, len(context) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1))
    return torch.cat(found)


@pytest.mark.parametrize(("architecture", "overrides"), MODELS)
@pytest.mark.parametrize("name", EPISODES)
def test_every_plan_gives_the_numbers_of_single_sequences(name, architecture, overrides, caplog):
    turns, model = EPISODES[name], tiny_model(architecture, **overrides)
    expected = alone(model, turns)
    expected_loss = weighted(expected)
    expected_gradient = gradient(model, expected_loss)
    for plan in PLANS:
        logprobs = token_logprobs(model, turns.batch, plan=plan).logprobs
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)
        loss = weighted(logprobs)
        assert abs(loss - expected_loss) <= 1e-5 * expected.norm()
        found = gradient(model, loss)
        assert (found - expected_gradient).norm() <= 1e-5 * expected_gradient.norm(), plan
    assert caplog.records == []


def test_stripped_thinking_costs_a_spine_and_a_branch_for_each_turn():
    batch = EPISODES["stripped"].batch
    assert batch.num_rows == 1
    assert sum(batch.context_lengths[i] + length for i, length in enumerate(batch.response_lengths)) == 2850
    assert batch.num_forward_tokens == 870
    assert lay_out(batch, "shared_prefix").input_ids.size(1) == 870 - 10  # the last token of a response is not fed
    assert lay_out(batch, "packed").input_ids.size(1) == 2850 - 10
    # The prompt, then each turn's branch and the next segment of the spine; the last of them has only one branch.
    forest = lay_out(batch, "shared_prefix").layout.forest
    spine = [0, *range(2, 19, 2)]
    assert forest == (
        (100, -1),
        *(segment for turn in range(8) for segment in ((49, spine[turn]), (30, spine[turn]))),
        *((49, spine[8]), (30 + 49, spine[8])),
    )


def test_episodes_of_a_group_share_what_they_begin_with():
    batch = EPISODES["group"].batch
    shared = collate._SHORTEST_SHARED
    assert batch.num_rows == 5
    assert batch.group_index == (0, 0, 0, 1, 1)
    # Of the first group, the second and the third episode go on; of the second group, the second one does.
    assert list(zip(batch.prompt_lengths, batch.prompt_parent, strict=True)) == [
        *((12, -1), (shared, 0), (4 + 5, 1), (5 + 5, 1), (5 + 5, 3)),
        *((12, -1), (shared + 7 + 5, 5)),
    ]
    assert batch.response_row == (0, 1, 1, 2, 2, 2, 3, 4, 4)


def test_append_only_turns_are_one_sequence():
    draw = Drawn()
    contexts = [draw(6)]
    for _ in range(3):
        contexts.append(contexts[-1] + draw(4))
    batch = flat_batch(contexts, [draw(1), draw(1), draw(1), draw(5)], rows=[0, 0, 0, 0])
    # A response of one token feeds none, but it is a child: only the chain behind it is fused.
    assert [length for length, _ in lay_out(batch, "shared_prefix").layout.forest] == [6, 4, 4, 4 + 4]
    last = batch.replace(
        prompt_index=(3,), response_lengths=(5,), response_row=(0,), response_ids=batch.response_ids[-5:],
        trainable=batch.trainable[-5:],
    )  # fmt: skip
    assert lay_out(last, "shared_prefix").layout.forest == ((6 + 3 * 4 + 4, -1),)


@pytest.mark.parametrize("name", EPISODES)
def test_every_token_of_the_flat_row_sees_its_own_sequence(name):
    """The tokens that the position before a response token sees, in order of position, are that token's context."""
    turns = EPISODES[name]
    inputs = lay_out(turns.batch, "shared_prefix")
    seen, positions = visible_positions(inputs.layout.forest), inputs.position_ids[0]
    sequences = [c + r[:i] for c, r in zip(turns.contexts, turns.responses, strict=True) for i in range(len(r))]
    for predictor, sequence in zip(inputs.predictors.tolist(), sequences, strict=True):
        (visible,) = seen[predictor].nonzero(as_tuple=True)
        assert positions[visible].tolist() == list(range(len(sequence)))
        assert inputs.input_ids[0, visible].tolist() == sequence


@pytest.mark.parametrize("num_parts", [2, 3])
def test_processes_share_the_tokens_of_a_forest(num_parts):
    row = lay_out(EPISODES["edited"].batch, "shared_prefix")
    parts = [part_of(row, place, num_parts) for place in range(num_parts)]
    padding = -row.input_ids.size(1) % num_parts
    for part in parts:
        assert part.layout.forest == (*row.layout.forest, *([(padding, -1)] if padding else []))
    joined = torch.cat([part.position_ids for part in parts], 1)
    assert torch.equal(joined[:, : row.position_ids.size(1)], row.position_ids)


@pytest.mark.parametrize("name", EPISODES)
def test_a_pass_in_pieces_gives_the_numbers_of_the_whole(name):
    model, batch = tiny_model("llama"), EPISODES[name].batch

    def score(piece):
        return token_logprobs(model, piece).logprobs

    # Groups share nothing, and an episode is never torn apart.
    assert [part.num_rows for part in batch.split(60)] == ([1, 2, 2] if name == "group" else [1])
    pieces = in_pieces(model, score, batch, max_tokens=60)
    torch.testing.assert_close(pieces, score(batch).detach(), rtol=0, atol=2e-6)


def test_prompts_of_a_chain_are_shared_although_no_two_responses_have_the_same():
    batch = stripped_thinking(3).batch
    assert batch.num_prompts == batch.num_responses
    assert batch.shares_prompts
    assert not flat_batch([[5], [6]], [[1], [2]], rows=[0, 0]).shares_prompts


def test_cost_and_minimum_flops_count_each_prompt_once():
    # A prompt of 4, continued by 3 tokens; responses of 5 and 2 tokens behind the first, of 6 behind both.
    batch = flat_batch([[1] * 4, [1] * 4, [1] * 7], [[2] * 5, [2] * 2, [2] * 6], groups=[0, 0], rows=[0, 1, 1])
    assert (batch.prompt_lengths, batch.prompt_parent) == ((4, 3), (-1, 0))
    tokens = ModelCost(token=Products(1, 0), position=Products(0, 0), pair={}, scores_rows=False)
    pairs = ModelCost(token=Products(0, 0), position=Products(0, 0), pair={None: Products(1, 0)}, scores_rows=False)
    fed = 4 + 3 + 4 + 1 + 5  # the last token of a response is not fed
    seen = 4**2 + (7**2 - 4**2) + (8**2 - 4**2) + (5**2 - 4**2) + (12**2 - 7**2)
    assert floor_flops(tokens, [batch], trains=False) == fed
    assert floor_flops(pairs, [batch], trains=False) == seen / 2
    # In two batches the first prompt counts once still, since the rows are of one group.
    assert floor_flops(tokens, batch.chunks(1), trains=False) == fed
    # The cost by which rows are dealt to ranks counts all tokens.
    seen = 4**2 + (7**2 - 4**2) + (9**2 - 4**2) + (6**2 - 4**2) + (13**2 - 7**2)
    assert _cost(batch, [0, 1], 2) == 4 + 3 + 5 + 2 + 6 + seen / 24
    assert batch.forward_tokens([0]) == 4 + 5
    assert batch.forward_tokens([1]) == 4 + 2 + 3 + 6


def test_rows_that_share_any_prompt_stay_together_where_they_fit():
    """Their first contexts differ, but not their second ones."""
    batch = flat_batch([[1], [5, 5], [2], [5, 5]], [[3], [3], [4], [4]], groups=[0, 0], rows=[0, 0, 1, 1])
    assert batch.num_forward_tokens == 8
    assert [part.num_rows for part in batch.split(8)] == [2]
    assert [part.num_forward_tokens for part in batch.split(7)] == [5, 5]


def test_a_batch_that_is_whole_and_in_its_place_is_not_copied():
    batch = stripped_thinking().batch
    assert batch.select(range(batch.num_rows)) is batch
    assert batch.to("cpu") is batch
    elsewhere = batch.to("meta")
    assert {tensor.device.type for tensor in elsewhere.tensors().values()} == {"meta"}
    assert elsewhere.device.type == "meta"


@pytest.mark.parametrize("plan", ["shared_prefix", "packed"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 64])  # 64: more than there are tokens
def test_parts_are_equally_long_and_make_up_the_row(plan: ForwardPlan, num_parts: int) -> None:
    row = lay_out(ragged_batch(), plan)
    assert row.position_ids is not None
    assert row.layout is not None
    parts = [part_of(row, place, num_parts) for place in range(num_parts)]
    total = row.input_ids.size(1)
    width = -(-total // num_parts)
    padding = num_parts * width - total
    assert [part.start for part in parts] == [place * width for place in range(num_parts)]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert joined.size(1) == num_parts * width
        assert torch.equal(joined[:, :total], getattr(row, name))
        assert not joined[:, total:].any()
    for part in parts:
        assert part.layout is not None
        assert part.layout.num_parts == num_parts
        # What fills the row up is a sequence of its own.
        assert part.layout.forest == (*row.layout.forest, *([(padding, -1)] if padding else []))
        assert torch.equal(part.predictors, row.predictors)


def opt() -> PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = AutoConfig.for_model("opt", vocab_size=32, word_embed_proj_dim=16, max_position_embeddings=20, **sizes)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]  # untyped


def nested() -> PreTrainedModel:
    """As models for images and text have it: the sizes of the text model are in a config of its own."""
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 40}
    model = tiny_model("llama")
    model.config = AutoConfig.for_model("llava", text_config={"model_type": "llama", **text})
    return model


def stretched() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
    return tiny_model("llama", max_position_embeddings=24, rope_parameters=rope)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        (lambda: tiny_model("gpt2", n_positions=24), PositionLimit(24, is_table=True)),
        (opt, PositionLimit(20, is_table=True)),
        (lambda: tiny_model("llama", max_position_embeddings=24), PositionLimit(24, is_table=False)),
        (nested, PositionLimit(40, is_table=False)),
        (stretched, PositionLimit(24, is_table=False, is_scaled=True)),
        # Its tokens have as many rows as it has positions, but they are no positions.
        (lambda: tiny_model("llama", max_position_embeddings=128), PositionLimit(128, is_table=False)),
    ],
)
def test_limit_is_that_of_the_config_and_of_a_table(model: Any, limit: PositionLimit) -> None:
    assert position_limit(model()) == limit


def test_model_without_a_number_has_no_limit() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    assert position_limit(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))) is None
    model = tiny_model("llama")
    model.config.max_position_embeddings = -1  # how some configs say that there is no limit
    assert position_limit(model) is None
