"""The committed `generated/` is exactly what today's schemas generate, in both languages."""

import filecmp
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _files(folder: Path, suffixes: set[str]) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in suffixes and path.is_file()
    }


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds what the schemas generate now."""
    folder = tmp_path_factory.mktemp("fresh")
    done = subprocess.run(
        [ROOT / "tools/generate", folder], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "generated"


@pytest.mark.requirement("API-1")
@pytest.mark.parametrize(
    ("language", "suffixes"), [("python", {".py", ".pyi"}), ("typescript", {".ts"})]
)
def test_committed_code_is_what_the_schemas_generate(
    fresh: Path, language: str, suffixes: set[str]
) -> None:
    committed = ROOT / "generated" / language
    names = _files(fresh / language, suffixes)
    assert any(name.startswith("callforest/capture/v1/") for name in names)
    assert _files(committed, suffixes) == names, "run `make generate`"
    _, changed, unreadable = filecmp.cmpfiles(committed, fresh / language, names, shallow=False)
    assert (changed, unreadable) == ([], []), "run `make generate`"


def test_generated_code_is_all_that_lives_there() -> None:
    suffixes = {".py", ".pyi", ".ts", ".pyc"}
    files = [path for path in (ROOT / "generated").rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix not in suffixes] == []
