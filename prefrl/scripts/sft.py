"""`prefrl sft` as a file, for `accelerate launch`, and as a module, for `python -m`."""

import sys

from prefrl.scripts.main import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
