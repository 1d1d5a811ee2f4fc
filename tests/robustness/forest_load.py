"""Rollouts of forest mode without end: harnesses that branch, compact, and send what is new alone.

What a harness does is drawn from its rollout's name, so that another attempt does it again. On the
gRPC edge requests are deltas, and whole ones where the gateway has lost their history.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import openai
from openai.types.chat import ChatCompletionMessageParam

from callforest.capture.v1 import attempt_pb2, selection_pb2
from callforest_client.rollout import OpenRollout, Outcome
from tests.robustness.chaos_edges import HarnessError, HistoryRequiredError, Question, Said
from tests.robustness.chaos_load import RESTARTS, ChaosLoad, Edge, new_key, opening, slot_of
from tests.robustness.forest_account import (
    Account,
    AskedCall,
    Chosen,
    call_id_of,
    history_of,
    told,
)

FOREST: Final = attempt_pb2.CAPTURE_MODE_FOREST
REJECTED: Final = 0.3
"""Share of the answers of a rollout that rejects which are rejected."""
COMPACTED_FROM: Final = 2
"""Answers that a conversation has before it is compacted."""
TURNS: Final = 4
"""Accepted answers of a rollout: a compacted history is continued too."""
EDGES: Final = 3
GRPC, EVENTS = 1, 2


@dataclass(slots=True)
class ForestLoad(ChaosLoad):
    """Plays groups of forest mode.

    Attributes:
        accounts: of each attempt, what its harness asked.
        chosen: of each finished rollout, what it was finished with.
    """

    accounts: dict[str, Account] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)

    async def _open(self, rollout_id: str) -> OpenRollout:
        rollout = await self.owner.open(rollout_id, mode=FOREST)
        assert rollout.attempt.mode == FOREST, "a client compares the mode that it asked for"
        return rollout

    async def _play(self, rollout: OpenRollout, group_id: str) -> str:
        account = self.accounts[rollout.capture_key] = Account(rollout.capture_key)
        harness = ForestHarness(self, rollout, account, self.edge(rollout), opening(group_id))
        return await harness.play()

    def _outcome(self, rollout: OpenRollout, response_id: str) -> Outcome:
        """Finish with a returned history, with a selection, or with neither: all is captured."""
        plain = ChaosLoad._outcome(self, rollout, response_id)
        account = self.accounts[rollout.capture_key]
        chance = random.Random(f"{rollout.rollout_id} ends")
        policy = chance.choice(("all_captured", "returned_history", "explicit"))
        accepted = tuple(one.call_id for one in account.accepted)
        terminal = accepted[-1]
        self.counts[policy] += 1
        outcome, selected = plain, None
        if policy == "returned_history":
            selected = accepted
            result = returned(account, with_references=chance.random() < 0.5)
            outcome = Outcome(plain.reward, declared_response_id=response_id, result=result)
        elif policy == "explicit":
            shown = account.answered if chance.random() < 0.5 else account.accepted
            selected = tuple(one.call_id for one in shown)
            asked = selection_pb2.Selection(call_ids=selected, terminal_call_id=terminal)
            outcome = Outcome(plain.reward, selection=asked)
        self.chosen[rollout.rollout_id] = Chosen(account.capture_key, policy, selected, terminal)
        return outcome


def returned(account: Account, *, with_references: bool) -> bytes:
    """Write what a harness returns: every accepted answer in order, at times named too."""
    said = [one.said for one in account.accepted if one.said is not None]
    result: dict[str, object] = {
        "responses": [
            {
                "id": one.response_id,
                "output": [{"type": "message", "role": "assistant", "content": one.text}],
            }
            for one in said
        ]
    }
    if with_references:
        turns = [{"model_calls": [{"response_id": one.response_id}]} for one in said]
        result["ng_trajectory"] = {"turns": turns}
    return json.dumps(result).encode()


@dataclass(slots=True)
class ForestHarness:
    """Plays one attempt.

    Attributes:
        load: whose it is.
        rollout: the attempt.
        account: written while it plays.
        edge: where it asks.
        messages: the conversation as the model is shown it.
        answers: the calls of the answers that are shown, in order.
        bases: the same, but "" for an answer that is shown behind another history than its own.
    """

    load: ChaosLoad
    rollout: OpenRollout
    account: Account
    edge: Edge
    messages: list[ChatCompletionMessageParam]
    answers: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    chance: random.Random = field(init=False)
    rejects: bool = field(init=False)
    compacts: bool = field(init=False)
    _kind: int = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.rollout.rollout_id)
        self.rejects = self.chance.random() < 0.6
        self.compacts = self.chance.random() < 0.6
        self._kind = slot_of(self.rollout) % EDGES

    async def play(self) -> str:
        """Play all turns; give the id of the last accepted response.

        Raises:
            OpenAIError: a request was refused, or the harness starts over.
        """
        response_id = ""
        for turn in range(TURNS):
            if self.compacts and len(self.answers) >= COMPACTED_FROM and self.chance.random() < 0.5:
                self._compact(turn)
            seed = self.chance.getrandbits(31)
            asked, said = await self._ask(seed)
            if self.rejects and self.chance.random() < REJECTED:
                asked, said = await self._ask(self._reject(turn, seed))
            asked.accepted = True
            response_id = said.response_id
            starts_over = slot_of(self.rollout) == RESTARTS
            if starts_over and self.rollout.attempt.attempt_number == 0:
                raise HarnessError("the harness starts over")
            self._accept(said, turn)
        return response_id

    def _accept(self, said: Said, turn: int) -> None:
        answer = {"role": "assistant", "content": said.text}
        if self._kind == EVENTS:
            answer["id"] = said.response_id  # what some harnesses echo
        self.messages += [answer, _user(f"turn {turn}: go on")]
        self.answers.append(said.call_id)
        self.bases.append(said.call_id)

    def _reject(self, turn: int, seed: int) -> int:
        """Ask again from where the harness is, for another seed, for something else, or the same.

        The engine answers the same request alike: then two calls of one history say the same.
        """
        way = self.chance.choice(("another seed", "another message", "the same"))
        self.load.counts[f"rejected for {way}"] += 1
        if way == "another message":
            self.messages[-1] = _user(f"turn {turn}: say it otherwise")
        return seed if way == "the same" else self.chance.getrandbits(31)

    def _compact(self, turn: int) -> None:
        """Drop a part of the history: what is left is another one, or that of an older call."""
        way = self.chance.choice(("middle", "older", "summary"))
        self.load.counts[f"compacted to {way}"] += 1
        head, last = self.messages[:2], self.messages[-2:]
        if way == "older":
            first = next(
                place for place, one in enumerate(self.messages) if "assistant" in _role(one)
            )
            self.messages = [*self.messages[: first + 1], _user(f"turn {turn}: from the beginning")]
            self.answers, self.bases = self.answers[:1], self.bases[:1]
        elif way == "middle":
            self.messages = [*head, *last]
            self.answers, self.bases = self.answers[-1:], [""]
        else:
            self.messages = [*head, _user(f"turn {turn}: {len(self.answers)} answers were given")]
            self.answers, self.bases = [], []

    async def _ask(self, seed: int) -> tuple[AskedCall, Said]:
        """Get an answer to the conversation; a delta's history may be sent after it.

        Which call it continues is said by a claim, or by the ids that the answers carry.
        """
        base = self.bases[-1] if self.bases else ""
        claim = "" if self._kind == EVENTS else base
        if self._kind != GRPC or not claim:
            return await self._logged(Question(self.messages, seed, claim))
        self.load.counts["deltas"] += 1
        try:
            return await self._logged(Question(self.messages, seed, claim, sent=1))
        except HistoryRequiredError:
            self.load.counts["histories sent after deltas"] += 1
        return await self._logged(Question(self.messages, seed, claim))

    async def _logged(self, question: Question) -> tuple[AskedCall, Said]:
        """Make one logical request, and write down what was asked and said."""
        key = new_key()
        messages = list(question.messages)
        asked = AskedCall(
            call_id_of(self.account.capture_key, key),
            history_of(messages),
            meant=self.answers[-1] if self.answers else "",
            is_delta=question.sent > 0,
        )
        self.account.asked.append(asked)
        try:
            said = await self.load.keyed(partial(self.edge, self.rollout, question), key)
        except openai.OpenAIError as error:
            asked.given_up = True
            if not isinstance(error, HistoryRequiredError):
                name = f"{self.account.capture_key}/{asked.call_id}"
                self.load.faults.lost.append(f"the answer to {name}: {error}")
            raise
        asked.said = said
        asked.ends = told([*messages, {"role": "assistant", "content": said.text}])
        self.load.note(self.rollout, said)
        return asked, said


def _user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def _role(message: ChatCompletionMessageParam) -> str:
    return message["role"]
