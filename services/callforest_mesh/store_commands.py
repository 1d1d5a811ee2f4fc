"""The subcommands that look after the stores: compact, backup, gc, and verify of whole stores."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from callforest_mesh.store_names import STORES
from callforest_mesh.terminal import Runner, Subcommands

if TYPE_CHECKING:
    from callforest_mesh.chassis.configuration import MeshConfiguration
    from callforest_mesh.chassis.store_copy import StoreCopy

_ALL: Final = "all"


def add_store_commands(
    commands: Subcommands,
    shared: argparse.ArgumentParser,
    run: Runner,
) -> None:
    """Add the subcommands to the command line.

    Args:
        commands: of `callforest`.
        shared: the flags that name a configuration.
        run: runs a command with it.
    """
    names = (*STORES, _ALL)
    compact = commands.add_parser(
        "compact", parents=[shared], help="give a stopped store's free pages back to the disk"
    )
    compact.add_argument("name", metavar="NAME", choices=names, help=", ".join(names))
    compact.set_defaults(command=lambda parsed: run(parsed, lambda read: _compact(parsed, read)))

    backup = commands.add_parser(
        "backup", parents=[shared], help="copy a store, or all as of one moment, from a live mesh"
    )
    backup.add_argument("name", metavar="NAME", choices=names, help=", ".join(names))
    backup.add_argument("directory", type=Path, metavar="DIRECTORY", help="holds a copy by name")
    backup.set_defaults(command=lambda parsed: run(parsed, lambda read: _backup(parsed, read)))

    sweep = commands.add_parser(
        "gc", parents=[shared], help="find what no training needs any more, and remove it"
    )
    sweep.add_argument("--apply", action="store_true", help="remove it; else it is only told")
    sweep.add_argument(
        "--settle",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long owners wait for admitted calls (300)",
    )
    sweep.add_argument(
        "--late-age",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="how much longer late bytes and superseded attempts stay (3600)",
    )
    sweep.add_argument(
        "--retention",
        type=_seconds,
        default=7 * 86_400.0,
        metavar="SECONDS",
        help="how long logs of consumed attempts stay (a week)",
    )
    sweep.add_argument(
        "--abandoned-age",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="release rollouts without a receipt whose last call is older (never)",
    )
    sweep.set_defaults(command=lambda parsed: run(parsed, lambda read: _sweep(parsed, read)))


def verify_stores(configuration: MeshConfiguration, directory: str) -> int:
    """Verify the stores in a directory, or in the state directory for ""; give the exit status."""
    from callforest_mesh.store_verification import verify_stores as verify

    found = verify(Path(directory) if directory else configuration.state_dir)
    _print("\n".join(found.lines()))
    return 1 if found.faults else 0


def _compact(parsed: argparse.Namespace, configuration: MeshConfiguration) -> int:
    from callforest_mesh.chassis.store_copy import compact

    for name, path in _there(parsed.name, configuration).items():
        _tell("compacted", name, compact(path))
    return 0


def _backup(parsed: argparse.Namespace, configuration: MeshConfiguration) -> int:
    from callforest_mesh.chassis.store_copy import back_up
    from callforest_mesh.chassis.store_moment import at_one_moment
    from callforest_mesh.chassis.store_snapshot import StoreSnapshot

    paths = _there(parsed.name, configuration)
    with ExitStack() as closers:
        snapshots = {
            name: closers.enter_context(StoreSnapshot(path)) for name, path in paths.items()
        }
        at_one_moment(list(snapshots.values()))
        for name, path in paths.items():
            copied = back_up(snapshots[name], path, parsed.directory / name)
            _tell("backed up", name, copied)
    return 0


def _sweep(parsed: argparse.Namespace, configuration: MeshConfiguration) -> int:
    from callforest_mesh.store_sweep import SweepPolicy, sweep

    policy = SweepPolicy(
        late_s=parsed.settle + parsed.late_age,
        log_s=parsed.retention,
        abandoned_s=parsed.abandoned_age,
    )
    paths = _chosen(_ALL, configuration)
    lines, status = sweep(configuration, paths, policy, now_s=time.time(), apply=parsed.apply)
    _print("\n".join(lines))
    return status


def _there(name: str, configuration: MeshConfiguration) -> dict[str, Path]:
    """Give the directories of the stores that a command names.

    Raises:
        FileNotFoundError: one is not on this machine.
    """
    paths = _chosen(name, configuration)
    for one, path in paths.items():
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not there: run it where the {one} store is")
    return paths


def _chosen(name: str, configuration: MeshConfiguration) -> dict[str, Path]:
    """Give the directories of the stores that a command names, as the services have them."""
    from callforest_mesh.mesh_options import finalizer_options, ledger_options, staging_options

    paths = {
        "finalizer": finalizer_options(configuration).path,
        "ledger": ledger_options(configuration).path,
        "staging": staging_options(configuration).path,
    }
    return paths if name == _ALL else {name: paths[name]}


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 on, not {text}")
    return seconds


def _tell(verb: str, name: str, copied: StoreCopy) -> None:
    before, after = copied.bytes_before >> 10, copied.bytes_after >> 10
    _print(f"{verb} {name}: {copied.records} records verified, {before} KiB -> {after} KiB")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
