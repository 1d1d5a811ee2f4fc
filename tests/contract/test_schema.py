"""The schemas keep their style, their documentation and their compatibility."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path("proto/baseline.binpb")
BUF = Path(sys.executable).parent / "buf"

# Field numbers of descriptor.proto, which spell the paths of SourceCodeInfo.
ENUM_OF_FILE, VALUE_OF_ENUM = 5, 2
METADATA = re.compile(r"^ *Metadata: (none|[a-z][a-z0-9_]*(, [a-z][a-z0-9_]*)*)\.$", re.MULTILINE)


def _buf(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([BUF, *arguments], cwd=cwd, capture_output=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def files() -> list[FileDescriptorProto]:
    """Return the descriptors of our own schemas, with their comments."""
    built = _buf("build", "proto", "-o", "-")
    assert built.returncode == 0, built.stderr.decode()
    image = FileDescriptorSet.FromString(built.stdout)
    return [file for file in image.file if file.package.startswith("callforest.")]


@pytest.mark.requirement("API-5")
def test_lint() -> None:
    """STANDARD and COMMENTS: every message, field, enum value and RPC says what it means."""
    done = _buf("lint")
    assert done.returncode == 0, done.stdout.decode()


def test_format() -> None:
    done = _buf("format", "--diff", "--exit-code", "proto")
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.requirement("API-5")
def test_nothing_breaks_the_baseline() -> None:
    assert (ROOT / BASELINE).exists(), "run `make baseline` once the first schemas are agreed"
    done = _buf("breaking", "proto", "--against", BASELINE)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.requirement("API-5")
@pytest.mark.parametrize("harm", ["remove", "rename", "renumber", "move"])
def test_the_baseline_catches_a_break(tmp_path: Path, harm: str) -> None:
    """The guard itself is tried, with the image that stands for the last release."""
    for name in ("proto", "third_party"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    record = tmp_path / "proto/callforest/capture/v1/call_record.proto"
    text = record.read_text()
    field = re.search(r"^  \w[\w.]* (\w+) = 1\b", text, re.MULTILINE)
    assert field, "the record has a field with number 1"
    if harm == "remove":
        text = text[: field.start()] + text[text.index(";", field.end()) + 1 :]
    elif harm == "rename":
        text = text[: field.start(1)] + "renamed_" + text[field.start(1) :]
    elif harm == "renumber":
        text = text[: field.end() - 1] + "999" + text[field.end() :]
    if harm == "move":
        record = record.rename(record.with_name("moved.proto"))
        for path in (tmp_path / "proto").rglob("*.proto"):
            path.write_text(path.read_text().replace("call_record.proto", "moved.proto"))
    else:
        record.write_text(text)
    built = _buf("build", "proto", "-o", "/dev/null", cwd=tmp_path)
    assert built.returncode == 0, built.stderr.decode()
    done = _buf("breaking", "proto", "--against", BASELINE, cwd=tmp_path)
    assert done.returncode != 0
    assert b"call_record.proto" in done.stdout


def test_every_rpc_declares_its_idempotency(files: list[FileDescriptorProto]) -> None:
    methods = [
        (f"{file.package}.{service.name}/{method.name}", method)
        for file in files
        for service in file.service
        for method in service.method
    ]
    assert methods
    silent = [name for name, rpc in methods if not rpc.options.HasField("idempotency_level")]
    assert silent == []


@pytest.mark.requirement("API-6")
def test_every_reason_names_its_metadata(files: list[FileDescriptorProto]) -> None:
    [file] = [file for file in files if file.package == "callforest.error.v1" and file.enum_type]
    comments = {
        tuple(place.path): place.leading_comments for place in file.source_code_info.location
    }
    [(position, reasons)] = [
        (i, enum) for i, enum in enumerate(file.enum_type) if enum.name == "ErrorReason"
    ]
    silent = [
        value.name
        for i, value in enumerate(reasons.value)
        if value.number != 0
        and not METADATA.search(comments.get((ENUM_OF_FILE, position, VALUE_OF_ENUM, i), ""))
    ]
    assert silent == [], "end the comment with a line like `Metadata: call_id, attempt.`"


def test_schemas_are_proto3(files: list[FileDescriptorProto]) -> None:
    """Editions need a protoc that users of other languages do not have yet."""
    assert {file.syntax for file in files} == {"proto3"}
