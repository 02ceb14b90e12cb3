"""What follows what in a flat batch, in host integers: rows, their responses, and the prompts before those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False, kw_only=True)
class Forest:
    """Rows with their responses, on a forest of prompts.

    A row has one response, or several: an episode has one for each request to the sampler. Losses, advantages and
    metrics see rows, the forward pass sees responses. A prompt may continue another one: response r follows the prompt
    `prompt_index[r]`, and that one its parents. Letters as in `prefrl.types`.
    """

    prompt_lengths: tuple[int, ...]  # P entries, each >= 1: the first response token is predicted from the prompt
    prompt_index: tuple[int, ...]  # R entries: the prompt that each response follows
    response_lengths: tuple[int, ...]  # R entries, each >= 1
    group_index: tuple[int, ...]  # B entries: rows whose rewards are compared, or the two sides of a pair
    # R entries: the row of each response, never decreasing, every row at least once. (): one response for each row.
    response_row: tuple[int, ...] = ()
    # P entries: the prompt that a prompt continues, a smaller number than its own; -1: none. (): no prompt has one.
    prompt_parent: tuple[int, ...] = ()

    # What follows from these, found at construction.
    num_rows: int = field(init=False)  # B
    num_responses: int = field(init=False)  # R
    num_prompts: int = field(init=False)  # P
    num_tokens: int = field(init=False)  # N, response tokens
    num_forward_tokens: int = field(init=False)  # in a forward pass with shared prompts
    responses: list[range] = field(init=False)  # B entries: the responses of each row, in order
    row_lengths: tuple[int, ...] = field(init=False)  # B entries: response tokens of each row
    prompt_stops: list[int] = field(init=False)  # P entries: tokens up to its end, those that it continues included
    # R entries: the prompts that each response follows: a root, then each time a prompt that continues the last.
    contexts: list[tuple[int, ...]] = field(init=False)
    context_lengths: list[int] = field(init=False)  # R entries: tokens before each response
    shares_prompts: bool = field(init=False)  # whether a prompt comes before several responses

    def __post_init__(self) -> None:
        """Fill in the responses' rows and the prompts' parents, unless they were given, and what follows from them."""
        num_rows, num_responses, num_prompts = map(len, (self.group_index, self.response_lengths, self.prompt_lengths))
        response_row = self.response_row or tuple(range(num_responses))
        prompt_parent = self.prompt_parent or (-1,) * num_prompts
        paths: list[tuple[int, ...]] = []
        stops: list[int] = []
        for prompt, (length, parent) in enumerate(zip(self.prompt_lengths, prompt_parent, strict=True)):
            paths.append((prompt,) if parent < 0 else (*paths[parent], prompt))
            stops.append(length if parent < 0 else stops[parent] + length)
        ends, row_lengths = [0] * num_rows, [0] * num_rows
        for response, (row, length) in enumerate(zip(response_row, self.response_lengths, strict=True)):
            ends[row] = response + 1
            row_lengths[row] += length
        context_lengths = [stops[prompt] for prompt in self.prompt_index]
        num_tokens, num_prompt_tokens = sum(row_lengths), sum(self.prompt_lengths)
        vars(self).update(  # the class is frozen
            response_row=response_row,
            prompt_parent=prompt_parent,
            num_rows=num_rows,
            num_responses=num_responses,
            num_prompts=num_prompts,
            num_tokens=num_tokens,
            num_forward_tokens=num_prompt_tokens + num_tokens,
            responses=[range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)],
            row_lengths=tuple(row_lengths),
            prompt_stops=stops,
            contexts=[paths[prompt] for prompt in self.prompt_index],
            context_lengths=context_lengths,
            shares_prompts=sum(context_lengths) > num_prompt_tokens,
        )

    def used_prompts(self, rows: Sequence[int]) -> list[int]:
        """The prompts of some rows, each once, in order of first use and after those that they continue."""
        return list(dict.fromkeys(p for row in rows for i in self.responses[row] for p in self.contexts[i]))

    def segments(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """The prompts, each once, and responses of some rows: the number of tokens before each, and its own."""
        prompts = [
            (self.prompt_stops[p] - self.prompt_lengths[p], self.prompt_lengths[p]) for p in self.used_prompts(rows)
        ]
        responses = [response for row in rows for response in self.responses[row]]
        return [*prompts, *((self.context_lengths[i], self.response_lengths[i]) for i in responses)]

    def forward_tokens(self, rows: Sequence[int]) -> int:
        """Number of tokens of some rows in a forward pass with shared prompts."""
        prompts = sum(self.prompt_lengths[prompt] for prompt in self.used_prompts(rows))
        return prompts + sum(self.row_lengths[row] for row in rows)

    def cut(self, token_budget: int, *, whole_groups: bool) -> list[list[int]]:
        """The rows of each part of `TokenBatch.split`.

        Raises:
            ValueError: The budget is not positive.
        """
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget}: needs to be >= 1")
        if 0 < self.num_forward_tokens <= token_budget and not whole_groups:
            return [list(range(self.num_rows))]
        pieces: list[tuple[int, list[int]]] = []  # cost in tokens, rows
        for rows in _rows_by(self.group_index if whole_groups else self._families()):
            pieces.extend([(self.forward_tokens(rows), rows)] if whole_groups else self._pieces(rows, token_budget))
        pieces.sort(key=lambda piece: -piece[0])
        bins: list[tuple[int, list[int]]] = []
        for cost, rows in pieces:
            fitting = [i for i, (used, _) in enumerate(bins) if used + cost <= token_budget]
            if fitting:
                fullest = max(fitting, key=lambda i: bins[i][0])
                bins[fullest] = (bins[fullest][0] + cost, bins[fullest][1] + rows)
            else:
                bins.append((cost, rows))
        return [sorted(rows) for _, rows in bins]

    def _families(self) -> list[int]:
        """A number for each row; rows that share a prompt, directly or through other rows, have the same."""
        leaders = list(range(self.num_prompts))

        def leader(prompt: int) -> int:
            while leaders[prompt] != prompt:
                prompt = leaders[prompt]
            return prompt

        roots = [[self.contexts[i][0] for i in responses] for responses in self.responses]
        for first, *others in roots:
            for other in others:
                leaders[leader(other)] = leader(first)
        return [leader(first) for first, *_ in roots]

    def _pieces(self, rows: Sequence[int], token_budget: int) -> list[tuple[int, list[int]]]:
        """Rows that share prompts, cut whenever the budget is full."""
        pieces: list[tuple[int, list[int]]] = []
        held: set[int] = set()  # prompts of the last piece
        for row in rows:
            prompts = self.used_prompts([row])
            added = self.row_lengths[row] + sum(
                self.prompt_lengths[prompt] for prompt in prompts if prompt not in held
            )
            if pieces and pieces[-1][0] + added <= token_budget:
                pieces[-1] = (pieces[-1][0] + added, [*pieces[-1][1], row])
                held.update(prompts)
            else:
                pieces.append((self.forward_tokens([row]), [row]))
                held = set(prompts)
        return pieces


def _rows_by(index: Sequence[int]) -> list[list[int]]:
    """Row numbers with equal entries, in order of first appearance."""
    rows: dict[int, list[int]] = {}
    for row, key in enumerate(index):
        rows.setdefault(key, []).append(row)
    return list(rows.values())
