"""Faults that a run can be given, so that the tests can prove that it would notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from callforest_core.custody.attempts import AttemptName, attempt_name
from callforest_mesh.ledger import core, restoring
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import CLOSED, SEALED
from tests.simulation.mesh import Mesh


def _none(_mesh: Mesh) -> None:
    """Change nothing."""


def _acks_early(mesh: Mesh) -> None:
    """Acknowledge before it is durable: what a crash finds under way is lost."""
    for disk in mesh.disks.values():
        disk.acks_early = True


def _no_fence(_mesh: Mesh) -> None:
    """Take rows behind the seal, as a ledger without fencing would."""
    apply = AttemptView.apply

    def unfenced(view: AttemptView, event) -> None:
        was = view.state
        view.state = CLOSED if was == SEALED else was
        apply(view, event)
        if was == SEALED:
            view.state = was

    AttemptView.apply = unfenced
    core.SEALED = -1


def _forgets_tokens(_mesh: Mesh) -> None:
    """Delete tokens when their group is published, before anyone consumed it."""
    from callforest_mesh.finalizer.cleanup import Cleanup

    async def step(self, tenant: str) -> bool:
        state = self._row_log.state(tenant)
        if state.cleaned_cursor >= state.head_cursor:
            return False
        await self._clean(tenant, state.cleaned_cursor + 1)
        await self._row_log.cleaned(tenant, state.cleaned_cursor + 1)
        return True

    Cleanup._step = step


def _last_owner(_mesh: Mesh) -> None:
    """Say of a call that is restored again that the attempt before made it."""
    copied = restoring._copied

    def forgetful(records, capture_key: str):
        events = copied(records, capture_key)
        number = attempt_name(capture_key)
        before = AttemptName(number.rollout_id, number.number - 1).capture_key
        for event in events:
            event.restored.source_capture_key = before
            if event.restored.coords.HasField("parent_call_id"):
                event.restored.coords.parent_capture_key = before
        return events

    restoring._copied = forgetful


FLAWS: Mapping[str, Callable[[Mesh], None]] = {
    "": _none,
    "acks-early": _acks_early,
    "no-fence": _no_fence,
    "forgets-tokens": _forgets_tokens,
    "last-owner": _last_owner,
}
