"""Small faults that could be in a module: one change of its syntax tree each.

What no test should look at is left alone: documentation, annotations, the texts of errors,
assertions, and how a dataclass is declared.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SWAPPED: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}
_WORD: Final = re.compile(r"[A-Za-z0-9_.:-]+")
_SHOWN_MOST: Final = 120
_SKIPPED: Final = frozenset(
    {"annotation", "returns", "decorator_list", "type_params", "bases", "format_spec"}
)
"""Fields of nodes within which nothing is changed."""
_UNTOLD: Final = (ast.Assert, ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr)
"""Nodes within which nothing is changed; a `raise` is only taken out whole."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module.

    Attributes:
        module: its dotted name.
        file: its file.
        place: the function or class around the change, dotted; "" at the module's level.
        line: where.
        before: the changed code, as it was.
        after: as it is now.
        number: tells changes of the same code apart.
        ordinal: its place among all changes of the module.
    """

    module: str
    file: Path
    place: str
    line: int
    before: str
    after: str
    number: int
    ordinal: int

    @property
    def name(self) -> str:
        """Say which it is, in a line that stays when lines around it move."""
        twin = f" #{self.number}" if self.number else ""
        return f"{self.module}:{self.place}: `{self.before}` -> `{self.after}`{twin}"

    def source(self) -> str:
        """Give the whole module with the change."""
        tree = ast.parse(self.file.read_text("utf-8"))
        change = next(itertools.islice(_changes(tree, ""), self.ordinal, None))
        change.apply()
        return ast.unparse(tree)


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of one node: where it hangs, and what takes its place.

    Attributes:
        parent: what it hangs from.
        field: by which field.
        index: where in that field, if it is a list.
        made: the new node.
        place: the function or class around it.
        line: where.
        shown: the expression or statement around the change that is short and says enough.
    """

    parent: ast.AST
    field: str
    index: int | None
    made: ast.AST
    place: str
    line: int
    shown: ast.AST

    def apply(self) -> ast.AST:
        """Put the new node into its place; give the old one."""
        if self.index is None:
            old: ast.AST = getattr(self.parent, self.field)
            setattr(self.parent, self.field, self.made)
            return old
        nodes: list[ast.AST] = getattr(self.parent, self.field)
        old, nodes[self.index] = nodes[self.index], self.made
        return old

    def undo(self, old: ast.AST) -> None:
        """Put the old node back."""
        if self.index is None:
            setattr(self.parent, self.field, old)
        else:
            getattr(self.parent, self.field)[self.index] = old

    def told(self) -> tuple[str, str]:
        """Give the code around the change as it was and as it is now."""
        before = _shown(self.shown)
        old = self.apply()
        after = _shown(self.made if self.shown is old else self.shown)
        self.undo(old)
        return before, after


def mutants_of(module: str, file: Path) -> list[Mutant]:
    """Name every mutant of a module."""
    tree = ast.parse(file.read_text("utf-8"))
    made: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    for ordinal, change in enumerate(_changes(tree, "")):
        key = (change.place, *change.told())
        number = seen[key] = seen.get(key, -1) + 1
        place, before, after = key
        made.append(Mutant(module, file, place, change.line, before, after, number, ordinal))
    return made


def _shown(node: ast.AST) -> str:
    """Give a node as code, of a block its head alone."""
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"[:_SHOWN_MOST]
    return " ".join(ast.unparse(node).split())[:_SHOWN_MOST]


def _changes(node: ast.AST, place: str) -> Iterator[_Change]:
    """Give the changes of what hangs below a node."""
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED:
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _is_documentation(child) or _is_invariant(child):
                continue
            inner = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{place}.{child.name}" if place else child.name
            line = getattr(child, "lineno", getattr(node, "lineno", 0))
            for made in _made_of(child):
                yield _Change(node, field, index, made, inner, line, _around(node, child))
            if not isinstance(child, _UNTOLD) and not _is_type_alias(child):
                yield from _changes(child, inner)


def _around(parent: ast.AST, child: ast.AST) -> ast.AST:
    """Choose what is shown of a change: an operator or a constant says nothing alone."""
    bare = not isinstance(child, ast.stmt | ast.expr) or isinstance(child, ast.Constant)
    in_block = not isinstance(parent, ast.expr | ast.comprehension) and hasattr(parent, "body")
    return parent if bare and not in_block else child


def _is_invariant(child: ast.AST) -> bool:
    """Say whether this is `strict=...` of a zip, which asserts what holds."""
    return isinstance(child, ast.keyword) and child.arg == "strict"


def _is_documentation(child: ast.AST) -> bool:
    return (
        isinstance(child, ast.Expr)
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
    )


def _is_type_alias(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "TypeAlias"
    )


def _made_of(node: ast.AST) -> Iterator[ast.AST]:
    """Give what may take the place of a node."""
    for kind, make in _MAKERS.items():
        if isinstance(node, kind):
            yield from make(node)
    swapped = _SWAPPED.get(type(node))
    if swapped is not None:
        yield ast.copy_location(swapped(), node)


def _of_constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str) and _WORD.fullmatch(value):
        yield ast.Constant(f"{value}x")
    elif isinstance(value, bytes):
        yield ast.Constant(value + b"x")


def _of_test(node: ast.If | ast.While | ast.IfExp) -> Iterator[ast.AST]:
    if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    changed = copy.copy(node)
    changed.test = ast.UnaryOp(ast.Not(), node.test)
    yield changed


def _of_comprehension(node: ast.comprehension) -> Iterator[ast.AST]:
    for index in range(len(node.ifs)):
        changed = copy.copy(node)
        changed.ifs = [*node.ifs[:index], *node.ifs[index + 1 :]]
        yield changed


def _of_not(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield node.operand


def _of_return(node: ast.Return) -> Iterator[ast.AST]:
    if node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.copy_location(ast.Return(ast.Constant(None)), node)


def _taken_out(node: ast.stmt) -> Iterator[ast.AST]:
    yield ast.copy_location(ast.Pass(), node)


def _of_expression(node: ast.Expr) -> Iterator[ast.AST]:
    if isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom):
        yield ast.copy_location(ast.Pass(), node)


_MAKERS: Final[dict[type | tuple[type, ...], Callable[..., Iterator[ast.AST]]]] = {
    ast.Constant: _of_constant,
    (ast.If, ast.While, ast.IfExp): _of_test,
    ast.comprehension: _of_comprehension,
    ast.UnaryOp: _of_not,
    ast.Return: _of_return,
    (ast.Raise, ast.AugAssign): _taken_out,
    ast.Expr: _of_expression,
}
