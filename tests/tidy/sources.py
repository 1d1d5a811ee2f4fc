"""The project's own files, as the tidy tests read them."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Written by tools or by others: test inputs, too, are kept as they were given.
FOREIGN = ("generated/", "third_party/", "tests/golden/data/")


def expect_none(faults: list[str], why: str = "") -> None:
    """Fail with every fault on a line of its own."""
    assert not faults, "\n".join([why, *faults])


@cache
def own_files() -> tuple[Path, ...]:
    """Return every file that git tracks or would track, but for foreign ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.split("\0")
    names = sorted(name for name in listed if name and not name.startswith(FOREIGN))
    return tuple(ROOT / name for name in names if (ROOT / name).is_file())


def name_of(path: Path) -> str:
    """Return the path as the failures print it."""
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str | None:
    """Return the text of a file, or None when it is not text."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Return the Python files under these folders (all of them when none is named)."""
    return tuple(
        path
        for path in own_files()
        if (path.suffix == ".py" or (text_of(path) or "").startswith("#!/usr/bin/env python"))
        and (not folders or name_of(path).startswith(folders))
    )


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return ast.parse(text_of(path) or "", filename=str(path))


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of names, or what of its end can be named."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else node.attr
    return ""


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each absolute module name that a file imports, with its line.

    `from a import b` yields `a.b`, because b may be a module. Relative imports are resolved
    against the import roots, and the names given to `import_module` count too.
    """
    package = package_of(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((str(name), node.lineno) for name in names)


def package_of(path: Path) -> tuple[str, ...]:
    """Return the package that holds a module, by the import roots of the distribution."""
    if ROOT not in path.parents:
        return ()
    name = name_of(path)
    for root in ("core/", "clients/python/", "services/", ""):
        if name.startswith(root):
            return tuple(name.removeprefix(root).split("/")[:-1])
    raise AssertionError(name)
