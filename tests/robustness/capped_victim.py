"""A victim of which one service, which alone may have a flaw, runs under a bound of its memory.

Usage: env MEMORY_CAP=CAP CAPPED=NAME python -m tests.robustness.capped_victim DIRECTORY serve NAME
"""

import os
import sys

from tests.robustness import victim
from tests.robustness.memory_cap import VARIABLE, enter

CAPPED = "CAPPED"


def main() -> int:
    if sys.argv[3] == os.environ[CAPPED]:
        enter(os.environ[VARIABLE])
    else:
        # A ledger that told too early of its rows would leave the owners waiting for them.
        os.environ[victim.FLAW_VARIABLE] = ""
    return victim.main()


if __name__ == "__main__":
    sys.exit(main())
