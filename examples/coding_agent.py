"""A small coding agent: it repairs the function in f.py until tests.py passes. Run it in the folder of these files.

It knows nothing of training. Like any program with OpenAI's client, it reads OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

TASK = "This function fails its tests:\n\n{source}\n{failure}\n\nSay only the expression that it must return."


def failure_of_tests() -> str:
    """The last line that the tests print; none if they pass."""
    command = [sys.executable, "tests.py"]
    try:
        tests = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return "The tests take too long."
    return (tests.stderr.strip().splitlines() or ["They fail."])[-1] if tests.returncode else ""


def function_in(answer: str) -> str | None:
    """The function in an answer, or one that returns the first expression in it."""
    if function := re.search(r"^def f\(.*?(?=^```|\Z)", answer, re.S | re.M):
        return function[0]
    expression = re.search(r"\b[ab] ?[-+*/%]{1,2} ?[ab]\b", answer)
    return f"def f(a, b):\n    return {expression[0]}\n" if expression else None


def main(num_tries: int = 2) -> None:
    """Ask, write, test, and tell the model what still fails."""
    client = openai.OpenAI()
    file, failure = Path("f.py"), failure_of_tests()
    messages: list[Any] = [{"role": "user", "content": TASK.format(source=file.read_text(), failure=failure)}]
    for _ in range(num_tries):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        if function := function_in(answer):
            file.write_text(function)
        failure = failure_of_tests()
        if not failure:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": failure}]
    print(failure or "repaired")


if __name__ == "__main__":
    main()
