"""The learner's process: `python -m callforest_mesh.trainer.learner.child --socket PATH`.

It serves `LearnerService` on the unix socket and ends when its standard input does (then its
parent is gone, whatever became of it) or on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from callforest.trainer.v1 import learner_service_pb2, learner_service_pb2_grpc
from callforest_mesh.chassis.child_server import child_server
from callforest_mesh.chassis.lifeline import end_with_parent
from callforest_mesh.trainer.learner.servicer import LearnerServicer

SERVICE_NAME = learner_service_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name


async def serve(socket: Path) -> None:
    """Serve one learner until the parent leaves."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = child_server("learner", SERVICE_NAME, calls_most=4)
    learner_service_pb2_grpc.add_LearnerServiceServicer_to_server(LearnerServicer(), server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    end_with_parent(ended)
    await ended.wait()
    await server.stop(grace=None)


def main() -> None:
    """Read the command line, serve, and leave at once, whatever the learner's thread is doing.

    A step that nobody waits for is lost with the process; files appear whole or not at all.
    """
    parser = argparse.ArgumentParser(description="Serve one learner on a unix socket.")
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.socket))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
