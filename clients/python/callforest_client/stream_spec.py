"""The messages of an item stream: what all of them have, and the names that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from callforest.capture.v1 import frame_pb2, item_pb2

PayloadT = TypeVar("PayloadT", bound=Message)
ResultT = TypeVar("ResultT", bound=Message)


class ItemLike(Protocol):
    """What every item message has; its body has a payload arm besides."""

    @property
    def context(self) -> item_pb2.ItemContext:
        """The item's context."""
        ...

    def WhichOneof(self, oneof_group: Literal["body"], /) -> str | None:  # noqa: N802 - theirs
        """Name the arm that is set."""
        ...

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Give the serialized size."""
        ...


class ResultLike(Protocol):
    """What every result message has; its outcome has an answer arm besides."""

    @property
    def sequence(self) -> int:
        """The item's sequence."""
        ...

    @property
    def error(self) -> status_pb2.Status:
        """Why the item failed."""
        ...

    @property
    def begin(self) -> frame_pb2.FrameBegin:
        """Announces a large answer."""
        ...

    @property
    def chunk(self) -> frame_pb2.FrameChunk:
        """A part of a large answer."""
        ...

    def WhichOneof(self, oneof_group: Literal["outcome"], /) -> str | None:  # noqa: N802 - theirs
        """Name the arm that is set."""
        ...

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Give the serialized size."""
        ...


PartT_co = TypeVar("PartT_co", covariant=True)


def put_arm(part: ItemLike | ResultLike, arm: str, content: Message) -> None:
    """Set an arm of an item or a result to a copy of a message.

    Copying into an empty message costs half of handing it to the constructor of its owner, which
    merges: with one message a call and step, the largest part of a stream's own cost.
    """
    place: Message = getattr(part, arm)
    place.CopyFrom(content)
    place.SetInParent()  # a copy of what is empty would choose no arm


class Growing(Protocol[PartT_co]):
    """A list of messages within another; what is added is made in place, and so copied once."""

    def add(self, **fields: object) -> PartT_co:
        """Make another message at the end."""
        ...

    def __len__(self) -> int:
        """Give how many there are."""
        ...

    def __iter__(self) -> Iterator[PartT_co]:
        """Give them in order."""
        ...


class RequestLike(Protocol):
    """What every request message of an item stream has."""

    @property
    def items(self) -> Growing[ItemLike]:
        """The items."""
        ...


class ResponseLike(Protocol):
    """What every response message of an item stream has."""

    @property
    def results(self) -> Growing[ResultLike]:
        """The results."""
        ...


ItemCall: TypeAlias = "grpc.aio.StreamStreamCall[RequestLike, ResponseLike]"


@dataclass(frozen=True, slots=True)
class StreamSpec(Generic[PayloadT, ResultT]):
    """Names the messages of one item stream.

    Attributes:
        name: the RPC, for messages to people.
        request: the request message, which has `items`.
        item: the item message, which has `context` and a body.
        payload_field: the body's arm that holds a whole payload.
        payload: the payload message.
        response: the response message, which has `results`.
        result: the result message, which has `sequence` and an outcome.
        answer_field: the outcome's arm that holds a whole answer.
        answer: the answer message.
        repeatable: whether an item may be sent again when its stream broke.
    """

    name: str
    request: Callable[..., RequestLike]
    item: Callable[..., ItemLike]
    payload_field: str
    payload: type[PayloadT]
    response: Callable[..., ResponseLike]
    result: Callable[..., ResultLike]
    answer_field: str
    answer: type[ResultT]
    repeatable: bool
