"""`python -m prefrl`: the command `prefrl`."""

import sys

from prefrl.scripts.main import main

if __name__ == "__main__":
    sys.exit(main())
