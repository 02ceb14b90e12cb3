"""Compare answers with math-verify in a separate process. It is run as a script, so that it does not import torch.

For each question it reads one line of JSON, `{"text": ..., "gold": ...}`, and writes two: `{"gold": ...}` as soon as
the gold answer is parsed, then `{"answer": ..., "is_correct": ...}`. A computation in SymPy or `re` cannot be
interrupted reliably from within, so the kernel ends the process at the deadline, by SIGALRM. (The watchdog thread of
`faulthandler` would walk the frames before it exits. It does so without the interpreter lock, and crashes if they
change meanwhile.)
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO, cast

from prefrl.errors import require

_MAX_MEMORY_BYTES = 4 << 30


def main() -> None:
    """Answer questions until standard input ends. The first argument is the deadline in seconds."""
    set_alarm, deadline = _alarm(), float(sys.argv[1])
    replies, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.CRITICAL)  # math-verify logs every expression that it cannot read
    _limit_memory()
    parse_gold, parse_answer, is_equal = _load()
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        set_alarm(deadline)
        question = json.loads(line)
        gold = parse_gold(question["gold"])
        _reply(replies, {"gold": _text(gold)})
        answer = parse_answer(question["text"]) if gold else []
        is_correct = bool(answer) and is_equal(gold, answer)
        _reply(replies, {"answer": _text(answer), "is_correct": is_correct})
        set_alarm(0)


def _alarm() -> Callable[[float], object]:
    """What sets the seconds until this process is ended; 0: never."""
    if sys.platform == "win32":
        return lambda _: None  # the process that asks ends it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # both are inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    return partial(signal.setitimer, signal.ITIMER_REAL)


def _text(parsed: list[Any]) -> str | None:
    # The last is the text that was parsed; writing out an expression may itself take forever.
    return str(parsed[-1]) if parsed else None


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _load() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    math_verify = require("math_verify", extra="math", feature="accuracy_reward")
    parse, verify = math_verify.parse, math_verify.verify

    # Only an answer that is marked as such counts: \boxed{} first, then LaTeX between dollar signs.
    marked = math_verify.LatexExtractionConfig(
        normalization_config=math_verify.LatexNormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )

    def parse_gold(text: str) -> list[Any]:
        # Without dollar signs, math-verify would read only the last number of LaTeX, such as the 2 of 2\sqrt{3}.
        found: list[Any] = parse(f"${text}$", parsing_timeout=None) if _is_bare_latex(text) else []
        return found or cast("list[Any]", parse(text, parsing_timeout=None))

    def parse_answer(text: str) -> list[Any]:
        found: list[Any] = parse(text, extraction_config=[marked], extraction_mode="first_match", parsing_timeout=None)
        return found

    def is_equal(gold: list[Any], answer: list[Any]) -> bool:
        return bool(verify(gold, answer, timeout_seconds=None))

    return parse_gold, parse_answer, is_equal


def _is_bare_latex(text: str) -> bool:
    if re.search(r"\$|\\boxed|\\\(|\\\[", text) or not re.search(r"[\\^_=(\[]", text):
        return False
    letters = re.sub(r"\\(?:text|mathrm|begin|end)\s?\{[^{}]*\}|\\[A-Za-z]+", "", text)
    return not re.search(r"[A-Za-z]{3,}", letters)  # prose


def _limit_memory() -> None:
    if sys.platform != "linux":  # macOS refuses a limit below the addresses that each process has reserved
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
