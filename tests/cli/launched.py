"""The command as a launcher of several processes runs it."""

import sys

from prefrl.scripts.main import main
from tests.leave import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
