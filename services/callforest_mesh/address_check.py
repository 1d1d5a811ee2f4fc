"""Whether an address can be listened at, and if not, what to do."""

from __future__ import annotations

import socket
from pathlib import Path

from callforest_mesh.finding import Finding, bad, good


def examine_address(subject: str, address: str, key: str) -> Finding:
    """Try to listen at an address, and leave it at once."""
    taken = f"{address} is taken: stop what listens there, or set another in {key}"
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if not path.parent.is_dir():
            return bad(subject, f"{path.parent} is not there: make the directory")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    return bad(subject, taken)
        except (OSError, UnicodeError) as error:  # a path of more than 107 bytes, for instance
            return bad(subject, f"{path} cannot be a socket ({error}): set another in {key}")
        return good(subject, f"{address} is free")
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name that can be none, for instance
        return bad(subject, f"{host} has no address here ({error}): set another in {key}")
    try:
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError as error:
        return bad(subject, f"{taken} ({error.strerror})")
    return good(subject, f"{address} is free")
