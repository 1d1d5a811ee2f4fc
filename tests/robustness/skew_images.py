"""What peers of other releases make of a message: one knows less of it, one says more.

The older release is one whose schemas are kept here, from before forest mode was whole; what `buf
breaking` guards is the last one. The newer one is any: it puts a field that nobody here knows into
every message, at every level.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import grpc_tools
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message
from grpc_tools import protoc

ROOT: Final = Path(__file__).parents[2]
EARLIER: Final = ROOT / "tests" / "robustness" / "earlier_release.binpb"
NOTE_NUMBER: Final = 20_000
NOTE: Final = b"\x82\xe2\x09\x05later"
"""Field 20000 with the bytes `later`, as it stands in a message."""

Change: TypeAlias = Callable[[str, bytes], bytes]
"""(full name of a message, its bytes) -> the bytes as another release would have written them."""


class Image:
    """The schemas of one release.

    Args:
        files: its descriptors, those that others import first.
    """

    def __init__(self, files: FileDescriptorSet) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            self._pool.Add(file)
        self.methods: dict[str, tuple[str, str]] = {
            f"/{file.package}.{service.name}/{method.name}": (
                method.input_type.removeprefix("."),
                method.output_type.removeprefix("."),
            )
            for file in files.file
            for service in file.service
            for method in service.method
        }
        self.sources = [one.name for one in files.file if one.name.startswith("callforest/")]

    def parse(self, name: str, serialized: bytes) -> Message:
        """Read a message as this release does."""
        kind = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))
        return kind.FromString(serialized)


def earlier() -> Image:
    """Give the schemas of the last release."""
    return Image(FileDescriptorSet.FromString(EARLIER.read_bytes()))


def todays() -> Image:
    """Give the schemas as they are."""
    built = subprocess.run(
        [str(Path(sys.executable).parent / "buf"), "build", "proto", "-o", "-"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return Image(FileDescriptorSet.FromString(built.stdout))


CLOSED = frozenset({"callforest.capture.v1.ReplaySummary"})
"""Messages that no release adds to: docs/protocol.md, section 12."""


def forgetting(image: Image) -> Change:
    """Let every message lose what a release does not know, as if it had been written by it."""

    def change(name: str, serialized: bytes) -> bytes:
        message = image.parse(name, serialized)
        message.DiscardUnknownFields()
        return message.SerializeToString()

    return change


def noting(image: Image) -> Change:
    """Let every message say more than a release knows."""

    def change(name: str, serialized: bytes) -> bytes:
        message = image.parse(name, serialized)
        note(message)
        return message.SerializeToString()

    return change


def note(message: Message) -> None:
    """Put an unknown field into a message and into every message within it, unless it has one."""
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or not is_ours(field):
            continue
        if field.message_type.full_name in CLOSED:
            continue
        for one in value if field.is_repeated else [value]:
            note(one)
    if not is_noted(message):
        message.MergeFromString(NOTE)


def is_ours(field: FieldDescriptor) -> bool:
    """Say whether a field holds messages of the project; maps hold none."""
    kind = field.message_type
    return kind.full_name.startswith("callforest.") and not kind.GetOptions().map_entry


def is_noted(message: Message) -> bool:
    """Say whether a message, those within it apart, has the unknown field."""
    bare = type(message)()
    bare.CopyFrom(message)
    for field, _ in message.ListFields():
        bare.ClearField(field.name)
    return NOTE in bare.SerializeToString()


def write_stubs(folder: Path) -> None:
    """Write the stubs of the last release."""
    image = earlier()
    words = [
        "protoc",
        f"--descriptor_set_in={EARLIER}",
        f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={folder}",
        f"--grpc_python_out={folder}",
        *image.sources,
    ]
    if protoc.main(words):
        raise RuntimeError("protoc does not take the earlier release")
