"""Episodes of an environment that is no Gym: it knows action ids and a score, nothing else (SEL-7).

The environment plays through the gateway like any harness and notes which answer each action was.
At its end it says which actions stood, in order, and what they scored. That becomes a selection and
a receipt; rows, segments and tokens stay the framework's.
"""

from __future__ import annotations

from collections.abc import Sequence

from callforest.capture.v1 import attempt_pb2, receipt_pb2, selection_pb2
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner

_RESPONSE_PREFIX = "chatcmpl-"


class EpisodeError(ValueError):
    """What an episode says of its actions cannot be translated. Nothing was finalized.

    Attributes:
        action_id: the action at fault, or "" when it is not one action.
    """

    def __init__(self, message: str, action_id: str = "") -> None:
        super().__init__(f"{message}: {action_id}" if action_id else message)
        self.action_id = action_id


class Episode:
    """One episode, from its first action to its receipt.

    Args:
        owner: opens and finishes the rollout behind it.
        rollout: the open attempt.
    """

    def __init__(self, owner: RolloutOwner, rollout: OpenRollout) -> None:
        self._owner = owner
        self._rollout = rollout
        self._calls: dict[str, str] = {}

    @classmethod
    async def begin(cls, owner: RolloutOwner, rollout_id: str) -> Episode:
        """Open an attempt of forest mode; a second one of a rollout gives the first up."""
        rollout = await owner.open(rollout_id, mode=attempt_pb2.CAPTURE_MODE_FOREST)
        return cls(owner, rollout)

    @property
    def base_url(self) -> str:
        """What an OpenAI-style client takes as its base URL."""
        return self._rollout.base_url

    @property
    def capture_key(self) -> str:
        """The attempt's name."""
        return self._rollout.capture_key

    def played(self, action_id: str, response_id: str) -> None:
        """Note which answer an action was, accepted or not.

        Args:
            action_id: the environment's own name of the action.
            response_id: the id of the response that it was, or the call's.

        Raises:
            EpisodeError: the action was another answer already.
        """
        call_id = response_id.removeprefix(_RESPONSE_PREFIX)
        if self._calls.setdefault(action_id, call_id) != call_id:
            raise EpisodeError("the action was another answer", action_id)

    def selection(
        self, action_ids: Sequence[str], scored_action_id: str | None = None
    ) -> selection_pb2.Selection:
        """Translate the actions that stood.

        Args:
            action_ids: in order.
            scored_action_id: the one that the score is of; the last if None.

        Raises:
            EpisodeError: none stood, one stood twice, or one was never played.
        """
        if not action_ids:
            raise EpisodeError("no action stood")
        for place, action_id in enumerate(action_ids):
            if action_id not in self._calls:
                raise EpisodeError("the action was never played", action_id)
            if action_id in action_ids[:place]:
                raise EpisodeError("the action stood twice", action_id)
        scored = action_ids[-1] if scored_action_id is None else scored_action_id
        if scored not in action_ids:
            raise EpisodeError("the scored action did not stand", scored)
        return selection_pb2.Selection(
            call_ids=[self._calls[action_id] for action_id in action_ids],
            terminal_call_id=self._calls[scored],
        )

    async def finish(
        self,
        action_ids: Sequence[str],
        score: float,
        *,
        group_id: str,
        slot: int,
        scored_action_id: str | None = None,
    ) -> receipt_pb2.Receipt:
        """End the episode and finalize its rollout; give the receipt.

        Args:
            action_ids: the actions that stood, in order.
            score: the reward, finite.
            group_id: names the group.
            slot: the rollout's place in it, from 0.
            scored_action_id: the action that the score is of; the last if None.

        Raises:
            EpisodeError: the actions cannot be translated; nothing was finalized.
            RefusedError: the selection is not one of captured calls.
        """
        selection = self.selection(action_ids, scored_action_id)
        outcome = Outcome(reward=score, selection=selection)
        return await self._owner.finish(self._rollout, outcome, group_id=group_id, slot=slot)
