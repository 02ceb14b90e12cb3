"""The command, run as by a launcher of several processes."""

import sys

from prefrl.scripts.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
