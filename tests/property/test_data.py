"""Packing, collation and the batch's own cutting lose no token and invent none."""

from __future__ import annotations

import datasets
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.data.chat import ChatTemplate, special_tokens
from prefrl.data.collate import flat_batch, sft_batch
from prefrl.data.next_turn import Answer, next_context
from prefrl.data.packing import pack_bfd, pack_prepared
from prefrl.losses.advantage.estimators import ScoredRows, rloo
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.options.policy_gradient import AdvantageParams
from prefrl.types import Completion, TokenBatch, Turn
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer

datasets.disable_progress_bars()

ids = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@st.composite
def batches(draw):
    """A batch and its rows: (group, prompt, response, flags)."""
    rows = draw(st.lists(st.tuples(st.integers(0, 2), ids, ids), min_size=1, max_size=8))
    rows = [(*row, draw(st.lists(st.booleans(), min_size=len(row[2]), max_size=len(row[2])))) for row in rows]
    groups, prompts, responses, flags = zip(*rows, strict=True)
    return flat_batch(prompts, responses, trainable=flags, groups=groups), rows


@st.composite
def sft_rows(draw):
    """Tokenized rows of distinct ids; the first flag is False and at least one is True."""
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=12))
    rows, start = [], 0
    for length in lengths:
        flags = draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1).filter(any))
        rows.append({"input_ids": list(range(start, start + length)), "trainable": [False, *flags]})
        start += length
    return rows


def rows_of(batch: TokenBatch):
    prompts = [part.tolist() for part in batch.prompt_ids.split(list(batch.prompt_lengths))]
    responses = [part.tolist() for part in batch.response_ids.split(list(batch.response_lengths))]
    flags = [part.tolist() for part in batch.trainable.split(list(batch.response_lengths))]
    return [
        (group, prompts[index], response, row_flags)
        for group, index, response, row_flags in zip(
            batch.group_index, batch.prompt_index, responses, flags, strict=True
        )
    ]


@given(batches())
def test_collated_rows_read_back_as_given_with_each_prompt_once_per_group(case):
    batch, rows = case
    assert rows_of(batch) == rows
    assert batch.num_prompts == len({(group, tuple(prompt)) for group, prompt, _, _ in rows})


@given(batches(), st.data())
def test_selected_rows_are_the_rows_selected(case, data):
    batch, rows = case
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=10))
    part = batch.select(chosen)
    assert rows_of(part) == [rows[row] for row in chosen]
    assert set(part.prompt_index) == set(range(part.num_prompts))


@given(batches(), st.integers(1, 30))
def test_split_keeps_every_row_once_and_the_budget(case, budget):
    batch, rows = case
    parts = batch.split(budget)
    assert sorted(row for part in parts for row in rows_of(part)) == sorted(rows)
    assert all(part.num_forward_tokens <= budget or part.num_rows == 1 for part in parts)


@given(st.lists(batches(), min_size=1, max_size=3))
def test_concatenated_batches_keep_all_rows_in_order(cases):
    joined = TokenBatch.concat([batch for batch, _ in cases])
    assert rows_of(joined) == [row for _, rows in cases for row in rows]


@given(batches(), st.integers(1, 4))
def test_chunks_concatenate_to_the_batch(case, size):
    batch, rows = case
    assert rows_of(TokenBatch.concat(batch.chunks(size))) == rows


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_bfd_places_every_sequence_once_in_few_enough_bins(lengths, capacity):
    bins = pack_bfd(lengths, capacity)
    assert sorted(index for numbers in bins for index in numbers) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in numbers) for numbers in bins]
    assert all(0 < load <= capacity for load in loads)
    # Two bins that fit together would not both have been opened.
    assert all(a + b > capacity for i, a in enumerate(loads) for b in loads[:i])


@settings(max_examples=30, deadline=None)
@given(sft_rows(), st.integers(9, 20))
def test_bfd_packing_changes_no_row_of_the_batch(rows, max_length):
    packed = pack_prepared(datasets.Dataset.from_list(rows), max_length=max_length)
    assert all(len(row["input_ids"]) == sum(row["seq_lengths"]) <= max_length for row in packed)
    assert sorted(token for row in packed for token in row["input_ids"]) == list(range(sum(map(_length, rows))))
    assert sorted(row[1:] for row in rows_of(sft_batch(list(packed)))) == sorted(
        row[1:] for row in rows_of(sft_batch(rows))
    )


@settings(max_examples=30, deadline=None)
@given(sft_rows(), st.integers(4, 12))
def test_wrapped_packing_keeps_every_loss_that_has_a_token_before_it(rows, max_length):
    flags = [flag for row in rows for flag in row["trainable"]]
    expected = {token for token, flag in enumerate(flags) if flag and token % max_length}
    if not expected:
        return
    packed = pack_prepared(datasets.Dataset.from_list(rows), max_length=max_length, strategy="wrapped")
    trained = [token for row in packed for token, flag in zip(row["input_ids"], row["trainable"], strict=True) if flag]
    assert trained == sorted(expected)
    assert all(row["seq_lengths"] == [len(row["input_ids"])] for row in packed)
    assert all(row["input_ids"] == list(range(row["input_ids"][0], row["input_ids"][-1] + 1)) for row in packed)


def _length(row):
    return len(row["input_ids"])


# The tokens that end answers, and calls; all of these templates print both.
ENDS = {
    templates.CHATML: ("<|im_end|>", "<|im_end|>"),
    templates.DEFAULT_SYSTEM: ("<|im_end|>", "<|im_end|>"),
    templates.LLAMA3: ("<|eot|>", "<|eot|>"),
    templates.ENDS_TEXT: ("<|eot|>", "<|eot|>"),
    templates.THINKING: ("<|im_end|>", "<|im_end|>"),
    templates.HEADERS_END: ("<|user|>", "<|tool|>"),
    templates.CALLS_END: ("<|im_end|>", "<|eot|>"),
    templates.KEEPS_THINKING: ("<|im_end|>", "<|im_end|>"),
}
PRINTS_CALLS = {
    templates.HEADERS_END: lambda a: f"<call>add a={a}</call>",
    templates.CALLS_END: lambda a: f'add{{"a": {a}}}',
}
WORDS = ("ab", "abc", "bc", "cab")  # tokens, so that a text can be split in several ways


def make(jinja):
    tokenizer = chat_tokenizer(jinja)
    tokenizer.add_tokens(list(WORDS))
    return ChatTemplate(tokenizer, special_tokens(tokenizer))


TEMPLATES = {jinja: make(jinja) for jinja in ENDS}

words = st.lists(st.sampled_from(["a", "b", "c", *WORDS]), min_size=1, max_size=5)
texts = words.map("".join)


@st.composite
def answers(draw, jinja, sent_ids):
    """An answer or a call, any split of its text, and the messages that follow."""
    template, is_call = TEMPLATES[jinja], jinja in PRINTS_CALLS and draw(st.booleans())
    was_cut = draw(st.booleans())
    if is_call:
        number = draw(st.integers(0, 99))
        call = {"function": {"name": "add", "arguments": {"a": number}}}
        message, tokens = {"role": "assistant", "content": "", "tool_calls": [call]}, PRINTS_CALLS[jinja](number)
    else:
        tokens = draw(words)
        thought = draw(st.sampled_from(["", "<think>c</think>"])) if jinja == templates.THINKING else ""
        tokens = [*thought, *tokens]
        message = {"role": "assistant", "content": "".join(tokens)}
    ids = template.tokenizer.convert_tokens_to_ids(list(tokens))
    if not was_cut:
        ids += template.tokenizer.convert_tokens_to_ids([ENDS[jinja][is_call]])
    count = len(ids)
    reason = "length" if was_cut else "stop"
    completion = Completion(ids, reason, [0.0] * count, [True] * count, [0] * count)
    new = [{"role": "tool" if is_call else "user", "content": draw(texts)}]
    return Answer(message, Turn(sent_ids, completion)), new


@st.composite
def conversations(draw, reasoning):
    """A template, and every turn of a conversation: its messages, those that were seen, the answers, the context."""
    jinja = draw(st.sampled_from(sorted(ENDS)))
    template = TEMPLATES[jinja]
    messages = [{"role": "user", "content": draw(texts)}]
    sent_ids = ids_of(template, template.render(messages, add_generation_prompt=True))
    said, steps = [], []
    for _ in range(draw(st.integers(1, 3))):
        answer, new = draw(answers(jinja, sent_ids))
        said = [*said, answer]
        seen = [*messages, answer.message]
        messages = [*seen, *new]
        context = next_context(template, messages, seen=seen, answers=said, reasoning=reasoning)
        steps.append((messages, seen, said, context))
        sent_ids = context.token_ids
    return template, steps


def ids_of(template, text):
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def text_of(template, token_ids):
    return template.tokenizer.decode(token_ids)


def holds(token_ids, part):
    return any(token_ids[i : i + len(part)] == part for i in range(len(token_ids)))


def unended(answer):
    completion = answer.turn.completion
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


@given(conversations("keep"))
def test_context_starts_with_all_that_was_sent_and_sampled(case):
    template, steps = case
    plain = TEMPLATES[templates.CHATML] if template is TEMPLATES[templates.THINKING] else template
    for messages, _, said, context in steps:
        row = said[-1].row
        assert context.extends
        assert context.token_ids[: len(row)] == row
        assert all(holds(context.token_ids, answer.turn.completion.token_ids) for answer in said)
        # THINKING prints what CHATML does, but for the thinking that it takes out.
        assert text_of(template, context.token_ids) == plain.render(messages, add_generation_prompt=True)


@given(conversations("template"))
def test_context_is_the_text_of_the_template_in_the_ids_that_were_sampled(case):
    template, steps = case
    for messages, _, said, context in steps:
        text = template.render(messages, add_generation_prompt=True)
        assert text_of(template, context.token_ids) == text
        row = said[-1].row
        assert context.extends == (context.token_ids[: len(row)] == row)
        assert context.extends or template is TEMPLATES[templates.THINKING]
        for answer in said:
            if "<think>" not in str(answer.message["content"]):
                assert holds(context.token_ids, unended(answer))


@given(conversations("template"), texts)
def test_edited_context_is_the_text_of_the_template_in_the_ids_that_were_sampled(case, text):
    template, steps = case
    messages, seen, said, _ = steps[-1]
    messages = [{**messages[0], "content": text + "!"}, *messages[1:]]
    for reasoning in ("template", "strip", "keep"):
        context = next_context(template, messages, seen=seen, answers=said, reasoning=reasoning)
        assert not context.extends
        if reasoning != "keep":
            assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
        for answer in said:
            if reasoning == "keep":
                assert holds(context.token_ids, answer.turn.completion.token_ids)
            elif "<think>" not in str(answer.message["content"]):
                assert holds(context.token_ids, unended(answer))


quick = settings(max_examples=50, deadline=None, derandomize=True)
NAN = float("nan")
DISCOUNTS = st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def episodes(draw, *, min_turns=0, max_turns=4):
    """Pairs of a group and the rewards of the turns; some have no reward, some no turn."""
    reward = st.one_of(st.integers(-8, 8).map(lambda i: i / 4), st.floats(-1, 1))
    turns = st.lists(reward, min_size=min_turns, max_size=max_turns)
    without = turns.filter(len).map(lambda rewards: [*rewards[:-1], NAN]) if max_turns else turns
    episode = st.tuples(st.integers(0, 2), st.one_of(turns, turns, turns, without))
    return draw(st.lists(episode, min_size=1, max_size=8))


def advantages(given_episodes, discount=1.0):
    """[turns] of each episode."""
    lengths = [len(rewards) for _, rewards in given_episodes]
    return turn_advantages(
        torch.tensor([reward for _, rewards in given_episodes for reward in rewards], dtype=torch.float64),
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor([group for group, _ in given_episodes]),
        discount=discount,
    ).split(lengths)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other, dtype=torch.float64), atol=1e-9, rtol=1e-9)


def rloo_of(totals, groups):
    rewards = torch.tensor(totals, dtype=torch.float64)[:, None]
    rows = ScoredRows(rewards, torch.ones(1), torch.tensor(groups), torch.ones(len(groups), dtype=torch.long))
    return rloo(rows, AdvantageParams()).values


@quick
@given(batch=episodes(), discount=DISCOUNTS)
def test_each_advantage_is_the_return_minus_the_mean_of_the_others(batch, discount):
    def from_turn(rewards, turn):
        return sum(reward * discount**later for later, reward in enumerate(rewards[turn:]))

    def has_reward(rewards):
        return len(rewards) > 0 and not any(reward != reward for reward in rewards)

    expected = []
    for number, (group, rewards) in enumerate(batch):
        others = [r for j, (g, r) in enumerate(batch) if j != number and g == group and has_reward(r)]
        expected.append(
            [from_turn(rewards, t) - sum(from_turn(r, t) for r in others) / len(others) for t in range(len(rewards))]
            if has_reward(rewards) and others
            else [0.0] * len(rewards)
        )
    assert_same(advantages(batch, discount), expected)


@quick
@given(batch=episodes(), discount=DISCOUNTS, data=st.data())
def test_advantages_follow_their_episodes_in_any_order(batch, discount, data):
    order = data.draw(st.permutations(range(len(batch))))
    found = advantages([(1000 - 7 * batch[i][0], batch[i][1]) for i in order], discount)
    expected = advantages(batch, discount)
    assert_same(found, [expected[i] for i in order])


@quick
@given(batch=episodes(min_turns=1), discount=DISCOUNTS, data=st.data())
def test_an_episode_that_is_cut_off_before_turns_without_rewards_changes_nothing(batch, discount, data):
    number = data.draw(st.integers(0, len(batch) - 1))
    group, rewards = batch[number]
    longer = [*batch[:number], (group, [*rewards, *[0.0] * data.draw(st.integers(1, 3))]), *batch[number + 1 :]]
    found = advantages(longer, discount)
    lengths = [len(rewards) for _, rewards in batch]
    assert_same([values[:length] for values, length in zip(found, lengths, strict=True)], advantages(batch, discount))


@quick
@given(batch=episodes(min_turns=1, max_turns=1), discount=DISCOUNTS)
def test_episodes_of_one_turn_have_the_advantages_of_rloo(batch, discount):
    groups, totals = [group for group, _ in batch], [rewards[0] for _, rewards in batch]
    assert torch.equal(torch.cat(advantages(batch, discount)), rloo_of(totals, groups))


@quick
@given(batch=episodes(min_turns=1))
def test_without_a_discount_the_first_turns_have_the_advantages_of_rloo_with_whole_episodes(batch):
    groups, totals = [group for group, _ in batch], [sum(rewards) for _, rewards in batch]
    first = torch.stack([values[0] for values in advantages(batch)])
    torch.testing.assert_close(first, rloo_of(totals, groups), atol=1e-9, rtol=1e-9)


@quick
@given(
    rewards=st.lists(st.floats(-1, 1), min_size=1, max_size=5),
    num_episodes=st.integers(1, 7),
    zeros=st.integers(0, 2),
    discount=st.sampled_from([0.3, 1.0]),
)
def test_equal_returns_have_advantages_of_exactly_0(rewards, num_episodes, zeros, discount):
    """Also in episodes that end at different turns, if nothing is paid there."""
    batch = [(0, rewards + [0.0] * (i % (zeros + 1))) for i in range(num_episodes)]
    assert not any(values.any() for values in advantages(batch, discount))
