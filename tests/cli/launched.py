"""The command, run as by a launcher of several processes."""

import sys

from prefrl.scripts.main import main
from tests.process import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
