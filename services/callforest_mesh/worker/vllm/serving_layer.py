"""Upstream's serving layer as the worker uses it: its requests, its failures, its renderer."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from callforest_mesh.worker.engine import EngineRefusalError, EngineUnavailableError, TokenIds
from callforest_mesh.worker.vllm.capture import current_capture

_LOGGER = logging.getLogger(__name__)


class QuietRenderer:
    """Stands for upstream's renderer: passes all on, and lets a measured call leave no trace.

    The cache of processed media is kept in step with the engine's: what a measure put there, the
    engine would never have got.

    Args:
        inner: the real one (`vllm.renderers.online_renderer.OnlineRenderer`).
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def render_chat(self, request: Any, **options: Any) -> Any:
        """Render as the inner renderer does."""
        capture = current_capture.get()
        if capture is not None and capture.is_measured:
            options["skip_mm_cache"] = True
        return await self._inner.render_chat(request, **options)


async def render_history(renderer: Any, body: dict[str, Any]) -> TokenIds:
    """Render a conversation that is not generated from.

    Args:
        renderer: upstream's.
        body: a request as `chat_body` makes it.

    Raises:
        EngineRefusalError: it cannot be rendered.
        EngineUnavailableError: the renderer failed.
    """
    from vllm.entrypoints.serve import create_error_response

    try:
        rendered = await renderer.render_chat(parse_request(body), skip_mm_cache=True)
    except EngineRefusalError:
        raise
    except Exception as error:  # noqa: BLE001 - upstream sorts its own exceptions
        rendered = create_error_response(error)
    failure = getattr(rendered, "error", None)
    if failure is not None:
        raise_failure(failure, generated=False)
    _, (prompt,) = rendered
    return np.asarray(prompt["prompt_token_ids"], np.uint32)


async def render_spelling(renderer: Any, body: dict[str, Any]) -> TokenIds | None:
    """Render a history in another spelling; None when the renderer cannot read it."""
    try:
        return await render_history(renderer, body)
    except (EngineRefusalError, EngineUnavailableError) as error:
        # A template that fails on a spelling, whatever it raises, is not equal under it.
        _LOGGER.info("a spelling of the history does not render: %s", error)
        return None


def parse_request(body: dict[str, Any]) -> Any:
    """Validate as upstream's HTTP layer does.

    Raises:
        EngineRefusalError: a field is missing or malformed; the first one is named.
    """
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    try:
        return ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise EngineRefusalError(message, parameter=str(next(iter(first["loc"]), ""))) from error
    except VLLMValidationError as error:
        raise EngineRefusalError(str(error), parameter=error.parameter or "") from error


def raise_failure(failure: Any, *, generated: bool) -> None:
    """Raise what an upstream error means here: 4xx before generation refuses, all else fails."""
    overloaded = failure.code in (408, 429)
    if 400 <= failure.code < 500 and not overloaded and not generated:
        raise EngineRefusalError(failure.message, parameter=failure.param or "")
    raise EngineUnavailableError(failure.message)
