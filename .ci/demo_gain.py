"""Fail unless GRPO raised the demo's held-out accuracy enough: `demo_gain.py SUMMARY.json`.

`demo_gain.py FOLDER` runs the demo into this folder first, with fewer steps of GRPO, which must gain as much.
"""

import json
import sys
from pathlib import Path

from prefrl.scripts import demo
from prefrl.scripts.main import main as prefrl

STEPS = 160  # the demo takes 400
REQUIRED_GAIN = 0.15
REQUIRED_GAIN_OF_REAL_MODEL = 0.2


def main() -> int:
    """The exit code."""
    path = Path(sys.argv[1])
    if path.suffix != ".json":
        demo.GRPO_STEPS = STEPS
        if code := prefrl(["demo", "--seed", "0", "--output_dir", str(path)]):
            return code
        path /= "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    has_sft = "accuracy_sft" in summary  # the real model is already fine-tuned
    required = REQUIRED_GAIN if has_sft else REQUIRED_GAIN_OF_REAL_MODEL
    gain = summary["accuracy_grpo"] - summary["accuracy_sft" if has_sft else "accuracy_base"]
    sft = f"{summary['accuracy_sft']:.3f} after SFT -> " if has_sft else ""
    print(
        f"demo: accuracy {summary['accuracy_base']:.3f} -> {sft}{summary['accuracy_grpo']:.3f} after "
        f"{summary['grpo_steps']} steps of GRPO (gain {gain:.3f}), {summary['seconds_total']:.0f} s"
    )
    if gain < required:
        print(f"demo: GRPO must gain at least {required}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
