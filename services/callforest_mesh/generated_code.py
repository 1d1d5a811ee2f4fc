"""Does the generated code fit the protobuf and gRPC that are installed?

It is looked at before anything else is imported: with a misfit, nothing can be.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from callforest_mesh.finding import Finding, bad, good

SUBJECT: Final = "generated code"
REMEDY: Final = "install callforest[mesh] again, so that protobuf and grpcio are as new as it asks"


def examine(names: Iterable[str] | None = None) -> Finding:
    """Import generated modules, all of them unless some are named."""
    count = 0
    for name in _modules() if names is None else names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return bad(SUBJECT, f"{name} cannot be imported ({error}): {REMEDY}")
        except Exception as error:  # noqa: BLE001 - each refuses in its own way
            reason = " ".join(str(error).split())
            return bad(SUBJECT, f"{name} does not fit what is installed ({reason}): {REMEDY}")
        count += 1
    return good(SUBJECT, f"{count} modules fit the installed protobuf and grpcio")


def _modules() -> Iterator[str]:
    import callforest

    root = Path(next(iter(callforest.__path__)))
    for file in sorted((*root.rglob("*_pb2.py"), *root.rglob("*_pb2_grpc.py"))):
        yield ".".join(("callforest", *file.relative_to(root).with_suffix("").parts))
