"""A service's process that finds its peers behind proxies.

Usage: env DETOURS='{"worker": {"staging": "127.0.0.1:4000"}}' \
    python -m tests.robustness.detour serve worker ...
"""

from __future__ import annotations

import json
import os
import sys

from callforest_mesh import cli

DETOURS = "DETOURS"


def main() -> int:
    arguments = sys.argv[1:]
    for peer, address in json.loads(os.environ[DETOURS]).get(arguments[1], {}).items():
        arguments += ["--set", f"addresses.{peer}={address}"]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
