"""What follows what in a flat batch, in host integers: rows, their responses, and the prompts before those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Forest"]


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

    def __post_init__(self) -> None:
        """Fill in the responses' rows and the prompts' parents, unless they were given."""
        if not self.response_row:
            object.__setattr__(self, "response_row", tuple(range(self.num_responses)))
        if not self.prompt_parent:
            object.__setattr__(self, "prompt_parent", (-1,) * self.num_prompts)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.group_index)

    @property
    def num_responses(self) -> int:
        """R."""
        return len(self.response_lengths)

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        """N, the number of response tokens."""
        return sum(self.response_lengths)

    @property
    def num_forward_tokens(self) -> int:
        """Number of tokens in a forward pass with shared prompts."""
        return sum(self.prompt_lengths) + self.num_tokens

    def responses(self, row: int) -> range:
        """The responses of a row, in order."""
        return self._responses[row]

    def context(self, response: int) -> tuple[int, ...]:
        """The prompts that a response follows, in order: a root, then each time a prompt that continues the last."""
        return self._paths[self.prompt_index[response]]

    def context_length(self, response: int) -> int:
        """Number of tokens before a response."""
        return self.prompt_stops[self.prompt_index[response]]

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt comes before several responses."""
        return sum(map(self.context_length, range(self.num_responses))) > sum(self.prompt_lengths)

    def used_prompts(self, rows: Sequence[int]) -> list[int]:
        """The prompts of some rows, each once, in order of first use and after those that they continue."""
        return list(dict.fromkeys(p for row in rows for i in self.responses(row) for p in self.context(i)))

    def segments(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """The prompts, each once, and responses of some rows: the number of tokens before each, and its own."""
        prompts = [
            (self.prompt_stops[p] - self.prompt_lengths[p], self.prompt_lengths[p]) for p in self.used_prompts(rows)
        ]
        responses = [response for row in rows for response in self.responses(row)]
        return [*prompts, *((self.context_length(i), self.response_lengths[i]) for i in responses)]

    def forward_tokens(self, rows: Sequence[int]) -> int:
        """Number of tokens of some rows in a forward pass with shared prompts."""
        return sum(length for _, length in self.segments(rows))

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        """B entries: number of response tokens of each row."""
        return tuple(sum(self.response_lengths[i] for i in responses) for responses in self._responses)

    @cached_property
    def prompt_stops(self) -> list[int]:
        """P entries: number of tokens up to the end of each prompt, those that it continues included."""
        stops: list[int] = []
        for length, parent in zip(self.prompt_lengths, self.prompt_parent, strict=True):
            stops.append(length if parent < 0 else stops[parent] + length)
        return stops

    def cut(self, token_budget: int, *, whole_groups: bool) -> list[list[int]]:
        """The rows of each part of `TokenBatch.split`.

        Raises:
            ValueError: The budget is not positive.
        """
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget}: needs to be >= 1")
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

    @cached_property
    def _responses(self) -> list[range]:
        """The responses of each row."""
        stops = [0] * self.num_rows
        for response, row in enumerate(self.response_row):
            stops[row] = response + 1
        return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    @cached_property
    def _paths(self) -> list[tuple[int, ...]]:
        """Each prompt with those that it continues, root first."""
        paths: list[tuple[int, ...]] = []
        for prompt, parent in enumerate(self.prompt_parent):
            paths.append((prompt,) if parent < 0 else (*paths[parent], prompt))
        return paths

    def _families(self) -> list[int]:
        """A number for each row; rows that share a prompt, directly or through other rows, have the same."""
        leaders = list(range(self.num_prompts))

        def leader(prompt: int) -> int:
            while leaders[prompt] != prompt:
                prompt = leaders[prompt]
            return prompt

        roots = [[self.context(i)[0] for i in responses] for responses in self._responses]
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
