"""A child for `ChildProcess`: serves gRPC's health on `--socket`, which never says how it is.

Words on the command line change it: `mute` never listens, `fail` ends with its last words, `fork`
starts a process of its own and writes that one's id into the log.
"""

import argparse
import asyncio
import os
import sys

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from callforest_mesh.chassis.lifeline import end_with_parent


class Silent(health_pb2_grpc.HealthServicer):
    """Knows of no service, and says so only when it is asked for one by name."""

    async def Check(self, request, context):  # noqa: N802 - the method's name in the schema
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.service} is unknown")
        await asyncio.Event().wait()


async def serve(socket: str, how: str) -> None:
    ended = asyncio.Event()
    end_with_parent(ended)
    if how == "fork":
        other = await asyncio.create_subprocess_exec("sleep", "600")
        print(other.pid, flush=True)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Silent(), server)
    if how != "mute":
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
    await ended.wait()
    await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--socket", required=True)
    arguments = parser.parse_args()
    if arguments.how == "fail":
        sys.exit(f"these were its last words, {os.environ.get('GREETING', 'unread')}")
    asyncio.run(serve(arguments.socket, arguments.how))


if __name__ == "__main__":
    main()
