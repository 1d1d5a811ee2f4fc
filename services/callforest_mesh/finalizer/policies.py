"""Selection policies by name: the built-in ones, and those of a harness (SEL-4).

A custom policy is a plain function `(records, result) -> (selected records, terminal response id)`
in a module that this process can import. It is found when the configuration is read; what it
raises never leaves the process.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from callforest_core.custody.call import CallRecord
from callforest_core.forest.selection import (
    ALL_CAPTURED,
    RETURNED_HISTORY,
    SelectionFault,
    SelectionRefusedError,
    checked_policy_answer,
)

_LOG = logging.getLogger("callforest")
_NAME: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

Function: TypeAlias = Callable[[list[CallRecord], object], object]


@dataclass(frozen=True, slots=True)
class Policy:
    """What selects when a request does not.

    Attributes:
        name: `returned_history`, `all_captured` or `package.module:function`.
        function: of a custom policy, else None.
    """

    name: str
    function: Function | None = None

    def select(self, records: Sequence[CallRecord], result: object) -> tuple[tuple[str, ...], str]:
        """Ask a custom policy for the selected call ids and the scored one.

        It gets copies of the records, so that what it does to them is seen.

        Raises:
            SelectionRefusedError: it failed, or what it gave is no choice of these calls.
        """
        assert self.function is not None, "only a custom policy is asked"
        try:
            answer = self.function([replace(record) for record in records], result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; logged, refused
            raise self._failed(error) from None
        if inspect.iscoroutine(answer):
            answer.close()
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._failed(TypeError(f"gave {type(answer).__name__}, not a pair"))
        return checked_policy_answer(records, *answer)

    def _failed(self, error: BaseException) -> SelectionRefusedError:
        incident_id = secrets.token_hex(8)
        _LOG.error("incident %s in the policy %s", incident_id, self.name, exc_info=error)
        detail = f"{self.name} failed; the finalizer's log has incident {incident_id}"
        return SelectionRefusedError(SelectionFault.POLICY_FAILED, detail)


def resolve_policy(name: str) -> Policy:
    """Find a policy.

    Raises:
        ValueError: the name has no known form, its module cannot be imported, or what it names
            is no plain function of two arguments. The message says which.
    """
    if name in (RETURNED_HISTORY, ALL_CAPTURED):
        return Policy(name)
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"selection_policy must be {RETURNED_HISTORY}, {ALL_CAPTURED} or"
            f" package.module:function, not {name!r}"
        )
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module does when it is imported
        raise ValueError(f"selection_policy {name!r}: {module_name} cannot be imported") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        detail = f"{module_name} has no function {attribute}"
        raise ValueError(f"selection_policy {name!r}: {detail}")  # noqa: TRY004 - a wrong setting
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(f"selection_policy {name!r} must be a plain function, not a coroutine")
    try:
        inspect.signature(function).bind([], None)
    except TypeError as error:
        raise ValueError(f"selection_policy {name!r} must take (records, result)") from error
    return Policy(name, function)
