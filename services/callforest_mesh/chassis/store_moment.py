"""Snapshots of several stores as of one moment, of a mesh that goes on.

Snapshots that are taken one after the other are of several moments: what a service wrote between
two of them refers to what the others do not show. They are of one moment when, behind the last,
none of the stores has a later commit than its own snapshot: then all of them stood still from the
first snapshot's taking, or longer, until that look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from callforest_mesh.chassis.store_snapshot import StoreSnapshot

TRIES: Final = 100_000
"""How often the snapshots are taken anew: some seconds, of tries that last far less than a sync."""


class UnsteadyStoresError(OSError):
    """The stores never stood still for long enough to be seen as of one moment."""


def at_one_moment(snapshots: Sequence[StoreSnapshot], *, tries: int = TRIES) -> int:
    """See to it that snapshots are of one moment; each of them may move to a later commit.

    Args:
        snapshots: of the stores; nothing that was read of them may be used any more.
        tries: how often they are taken anew at most.

    Returns:
        How often they were.

    Raises:
        UnsteadyStoresError: there was a commit between them every time.
    """
    for taken in range(tries + 1):
        # Before any is read: what is between two of them is what a commit may fall into.
        if all(snapshot.is_latest for snapshot in snapshots):
            for snapshot in snapshots:
                snapshot.read_databases()
            return taken
        if taken < tries:
            for snapshot in snapshots:
                snapshot.renew()
    names = ", ".join(snapshot.name for snapshot in snapshots)
    raise UnsteadyStoresError(
        f"{names} were never without a commit between their snapshots, {tries} times: "
        "try again when the mesh is less busy, or stop its services"
    )
