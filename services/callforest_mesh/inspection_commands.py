"""The subcommands that look into a mesh: health, status, show, explain, verify and export."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from callforest_mesh.store_commands import verify_stores
from callforest_mesh.terminal import AWAY, DONE, NO, WRONG, Runner, Subcommands, complain, say

if TYPE_CHECKING:
    from callforest_mesh.chassis.configuration import MeshConfiguration

_Looking: TypeAlias = Callable[[argparse.Namespace, "MeshConfiguration"], tuple[list[str], int]]


def add_inspection_commands(
    commands: Subcommands, shared: argparse.ArgumentParser, run: Runner
) -> None:
    """Add the subcommands to the command line.

    Args:
        commands: of `callforest`.
        shared: the flags that name a configuration.
        run: runs a command with it.
    """
    health = commands.add_parser("health", parents=[shared], help="ask services whether they serve")
    health.add_argument("name", metavar="NAME", nargs="?", help="one of them, by its short name")
    health.set_defaults(command=lambda parsed: _health(parsed, run))

    status = commands.add_parser(
        "status", parents=[shared], help="tell what the services of a running mesh are at"
    )
    status.set_defaults(command=_printing(_status, run))

    show = commands.add_parser("show", parents=[shared], help="show a rollout or an attempt")
    show.add_argument("name", metavar="ROLLOUT|CAPTURE_KEY")
    show.add_argument("--svg", type=Path, metavar="FILE", help="draw the call graph")
    show.set_defaults(command=_printing(_show, run))

    explain = commands.add_parser("explain", parents=[shared], help="say why a call is what it is")
    explain.add_argument("name", metavar="CAPTURE_KEY/CALL_ID")
    explain.set_defaults(command=_printing(_explain, run))

    _add_verification(commands, shared, run)


def _add_verification(commands: Subcommands, shared: argparse.ArgumentParser, run: Runner) -> None:
    verify = commands.add_parser(
        "verify",
        parents=[shared],
        help="verify what an attempt has staged, a file of `export`, or whole stores",
    )
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "name", metavar="CAPTURE_KEY|FILE", nargs="?", help="a file, if there is one of the name"
    )
    what.add_argument(
        "--store",
        nargs="?",
        const="",
        metavar="DIRECTORY",
        help="stopped stores or a backup, by default state_dir",
    )
    verify.set_defaults(command=lambda parsed: _verify(parsed, run))

    export = commands.add_parser(
        "export", parents=[shared], help="write a group's rows with what proves them"
    )
    export.add_argument("group", metavar="GROUP")
    export.add_argument("file", type=Path, metavar="FILE")
    export.set_defaults(command=_printing(_export, run))


def _printing(look: _Looking, run: Runner) -> Callable[[argparse.Namespace], int]:
    """Make the command that prints what a look into the mesh finds."""

    def command(parsed: argparse.Namespace) -> int:
        def told(configuration: MeshConfiguration) -> int:
            lines, status = look(parsed, configuration)
            say("\n".join(lines))
            return status

        return run(parsed, told)

    return command


def _health(parsed: argparse.Namespace, run: Runner) -> int:
    from callforest_mesh.chassis.configuration import SERVICES

    if parsed.name is not None and parsed.name not in SERVICES:
        return complain(f"no service {parsed.name!r}; known are {', '.join(SERVICES)}", WRONG)

    def told(configuration: MeshConfiguration) -> int:
        from callforest_mesh import health_check

        names = configuration.services if parsed.name is None else (parsed.name,)
        found = health_check.check(configuration, names)
        for name, state in found.items():
            say(f"{name:<10} {state}")
        if health_check.AWAY in found.values():
            return AWAY
        return DONE if set(found.values()) == {"SERVING"} else NO

    return run(parsed, told)


def _status(_: argparse.Namespace, configuration: MeshConfiguration) -> tuple[list[str], int]:
    from callforest_mesh.mesh_status import tell

    return tell(configuration)


def _show(parsed: argparse.Namespace, configuration: MeshConfiguration) -> tuple[list[str], int]:
    from callforest_mesh.inspection import show

    return show(configuration, parsed.name, parsed.svg)


def _explain(parsed: argparse.Namespace, configuration: MeshConfiguration) -> tuple[list[str], int]:
    from callforest_mesh.inspection import explain_call

    return explain_call(configuration, parsed.name)


def _verify(parsed: argparse.Namespace, run: Runner) -> int:
    if parsed.name is not None and Path(parsed.name).is_file():
        from callforest_mesh.exported_rows import verify_file

        try:
            lines, status = verify_file(Path(parsed.name))
        except OSError as error:
            return complain(f"{parsed.name}: {error.strerror}", WRONG)
        say("\n".join(lines))
        return status

    if parsed.store is not None:
        return run(parsed, lambda configuration: verify_stores(configuration, parsed.store))
    return _printing(_verify_attempt, run)(parsed)


def _verify_attempt(
    parsed: argparse.Namespace, configuration: MeshConfiguration
) -> tuple[list[str], int]:
    from callforest_mesh.inspection import verify

    return verify(configuration, parsed.name)


def _export(parsed: argparse.Namespace, configuration: MeshConfiguration) -> tuple[list[str], int]:
    from callforest_mesh.exported_rows import export

    return export(configuration, parsed.group, parsed.file)
