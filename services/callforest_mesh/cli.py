"""`callforest`: runs the mesh, looks into it, and proves it.

Exit statuses: 0 done; 1 the answer is no (a check failed, nothing was found, a service was given
up); 2 the command line or the configuration is wrong; 3 a service does not answer. A second
SIGTERM ends a running mesh at once, with 143.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from callforest_mesh.inspection_commands import add_inspection_commands
from callforest_mesh.store_commands import add_store_commands
from callforest_mesh.terminal import AWAY, DONE, NO, WRONG, Subcommands, complain, say

if TYPE_CHECKING:
    from callforest_mesh.chassis.configuration import MeshConfiguration
    from callforest_mesh.finding import Finding

_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; give the exit status."""
    # Nothing here forks and goes on: children are programs of their own. gRPC would warn of each.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callforest",
        description="Exact-token capture and training for agentic rollouts.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"callforest {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = _configuration_flags()

    up = commands.add_parser("up", parents=[shared], help="run all services")
    up.add_argument(
        "--processes", action="store_true", help="each service in a process of its own, kept alive"
    )
    up.set_defaults(command=_up)

    serve = commands.add_parser("serve", parents=[shared], help="run one service")
    serve.add_argument("name", metavar="NAME", help="its short name, for instance ledger")
    serve.add_argument("--supervised", action="store_true", help="end when standard input does")
    serve.set_defaults(command=_serve)

    doctor = commands.add_parser("doctor", parents=[shared], help="check the installation")
    doctor.set_defaults(command=_doctor)

    add_inspection_commands(commands, shared, _with_configuration)
    add_store_commands(commands, shared, _with_configuration)

    _add_conformance(commands)

    demo = commands.add_parser("demo", help="one real loop, from harness to optimizer step")
    demo.add_argument(
        "--model", choices=("tiny", "smollm2"), default="tiny", help="random, or a real one of 135M"
    )
    demo.add_argument(
        "--harness",
        choices=("counting", "recency"),
        default="counting",
        help="shows the model its whole history, or compacts it (forest mode)",
    )
    demo.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    demo.add_argument("--learning-rate", type=float, metavar="RATE", help="0 learns nothing")
    demo.add_argument("--seed", type=int, metavar="N", help="of model, engine and learner")
    demo.add_argument("--state", type=Path, metavar="DIRECTORY", help="emptied first")
    demo.add_argument("--out", type=Path, metavar="DIRECTORY", help="where pictures go")
    demo.set_defaults(command=_demo)
    return parser


def _version() -> str:
    from importlib import metadata

    return metadata.version("callforest")


def _configuration_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--config", type=Path, metavar="FILE", help="the configuration, by default callforest.yaml"
    )
    flags.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="set one key, for instance gateway.port=8080; may be repeated",
    )
    return flags


def _add_conformance(commands: Subcommands) -> None:
    conformance = commands.add_parser("conformance", help="prove an implementation with cases")
    modes = conformance.add_subparsers(required=True, metavar="MODE")
    check = modes.add_parser("check", help="answer the cases of a file and compare")
    check.add_argument("suite", metavar="SUITE")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command=_conformance_check)
    evaluate = modes.add_parser("eval", help="answer cases from a file or standard input")
    evaluate.add_argument("suite", metavar="SUITE")
    evaluate.add_argument("file", type=Path, metavar="FILE", nargs="?")
    evaluate.set_defaults(command=_conformance_evaluate)


def _up(parsed: argparse.Namespace) -> int:
    def run(configuration: MeshConfiguration) -> int:
        from callforest_mesh.doctor import needs
        from callforest_mesh.mesh_options import check_all

        check_all(configuration)
        lacking = [one for one in needs(configuration) if not one.ok]
        for finding in lacking:
            complain(f"{finding.subject}: {finding.text}", NO)
        if lacking:
            return NO
        if not parsed.processes:
            from callforest_mesh import assembly

            return assembly.up(configuration)
        from callforest_mesh.supervisor import SupervisionError, supervise

        try:
            return supervise(configuration, _configuration_arguments(parsed))
        except SupervisionError as error:
            return complain(str(error), NO)

    return _with_configuration(parsed, run, log_as="mesh")


def _serve(parsed: argparse.Namespace) -> int:
    from callforest_mesh.chassis.configuration import SERVICES

    if parsed.name not in SERVICES:
        return complain(f"no service {parsed.name!r}; known are {', '.join(SERVICES)}", WRONG)

    def run(configuration: MeshConfiguration) -> int:
        from callforest_mesh import assembly

        return assembly.serve(parsed.name, configuration, supervised=parsed.supervised)

    return _with_configuration(parsed, run, log_as=parsed.name)


def _doctor(parsed: argparse.Namespace) -> int:
    from callforest_mesh import generated_code

    def report(finding: Finding) -> bool:
        mark = "ok" if finding.ok else "NO"
        say(f"{mark:<3} {finding.subject:<22} {finding.text}")
        return finding.ok

    if not report(generated_code.examine()):
        return NO

    def run(configuration: MeshConfiguration) -> int:
        from callforest_mesh.doctor import examine

        answers = [report(finding) for finding in examine(configuration)]  # all are said
        return DONE if all(answers) else NO

    return _with_configuration(parsed, run)


def _conformance_check(parsed: argparse.Namespace) -> int:
    from callforest_mesh.conformance.command import check

    try:
        return check(parsed.suite, parsed.file)
    except OSError as error:
        return complain(f"{parsed.file}: {error.strerror}", WRONG)


def _conformance_evaluate(parsed: argparse.Namespace) -> int:
    from callforest_mesh.conformance.command import evaluate

    if parsed.file is None:
        return evaluate(parsed.suite, sys.stdin, sys.stdout)
    try:
        with parsed.file.open(encoding="utf-8") as cases:
            return evaluate(parsed.suite, cases, sys.stdout)
    except OSError as error:
        return complain(f"{parsed.file}: {error.strerror}", WRONG)


def _demo(parsed: argparse.Namespace) -> int:
    from callforest_client.failure_budget import RunStoppedError
    from callforest_mesh.demo.loop import DemoFailedError
    from callforest_mesh.demo.policy import POLICIES, compacting
    from callforest_mesh.demo.run import DemoOptions
    from callforest_mesh.demo.run import main as run_demo
    from callforest_mesh.demo.smollm2 import ModelAbsentError
    from callforest_mesh.supervisor import SupervisionError

    names = ("steps", "learning_rate", "seed", "state", "out")
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    try:
        policy = POLICIES[parsed.model]
        if parsed.harness == "recency":
            policy = compacting(policy)
        return run_demo(DemoOptions(policy=policy, **given))
    except (DemoFailedError, ModelAbsentError, RunStoppedError, SupervisionError) as error:
        return complain(str(error), NO)


def _with_configuration(
    parsed: argparse.Namespace,
    run: Callable[[MeshConfiguration], int],
    *,
    log_as: str = "",
) -> int:
    """Read the configuration, set up the log, run, and turn what fails into a status."""
    import logging

    from callforest_client.errors import CallforestError, UnavailableError
    from callforest_core.refusal import Refusal
    from callforest_mesh.chassis.configuration import load
    from callforest_mesh.chassis.configuration_section import ConfigurationError
    from callforest_mesh.chassis.log_lines import write_log
    from callforest_mesh.chassis.server import ServerStartError

    try:
        configuration = load(parsed.config, settings=parsed.settings)
        level = logging.getLevelNamesMapping()[configuration.log.level.upper()]
        write_log(log_as or "callforest", style=configuration.log.format, level=level)
        return run(configuration)
    except ConfigurationError as error:
        return complain(f"the configuration is wrong: {error}", WRONG)
    except ServerStartError as error:
        return complain(str(error), NO)
    except UnavailableError as error:
        return complain(f"{error}; is the mesh up?", AWAY)
    except (CallforestError, Refusal, OSError) as error:
        return complain(str(error), NO)
    except Exception:
        logging.getLogger("callforest").exception("a fault ends the process")
        return NO


def _configuration_arguments(parsed: argparse.Namespace) -> list[str]:
    """Repeat what the command line said of the configuration, for children."""
    arguments = [] if parsed.config is None else ["--config", str(parsed.config)]
    for setting in parsed.settings:
        arguments += ["--set", setting]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
