"""Fail unless GRPO raised the accuracy of the demo's real model enough: `demo_gain.py SUMMARY.json`."""

import json
import sys
from pathlib import Path

REQUIRED_GAIN = 0.2


def main() -> int:
    """The exit code."""
    summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    gain = summary["accuracy_grpo"] - summary["accuracy_base"]
    print(
        f"demo: accuracy {summary['accuracy_base']:.3f} -> {summary['accuracy_grpo']:.3f} after "
        f"{summary['grpo_steps']} steps of GRPO (gain {gain:.3f}), {summary['seconds_total']:.0f} s"
    )
    if gain < REQUIRED_GAIN:
        print(f"demo: GRPO must gain at least {REQUIRED_GAIN}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
