"""A Responses request as the Chat Completions request that the engine takes. Pure.

Contract: docs/protocol.md, section "The HTTP edge", part "Responses". What is not translated and
not known to be without effect goes to the engine under its own name, as with Chat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from callforest_core.lineage.items import Item
from callforest_mesh.gateway.refusals import HttpRefusal, malformed, unsupported
from callforest_mesh.gateway.response_input import messages_of
from callforest_mesh.gateway.unsupported import Rule, refuse_fields, refuse_prefill, refuse_turns

_RULES: Final = (
    Rule(("background",), (None, False), "A response is made while its caller waits."),
    Rule(("prompt",), (None,), "No prompt templates are kept here. Send the text itself."),
    Rule(
        ("context_management",),
        (None, []),
        "History that the server rewrites is not the conversation that was recorded. Rewrite it "
        "yourself and send it whole.",
    ),
)
_CHAT_FIELDS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
}
"""Fields that the translation writes, or that only Chat Completions has: what to send instead."""

_TRANSLATED: Final = frozenset(
    {
        *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text"),
        *("reasoning", "include", "top_logprobs", "stream", "stream_options"),
    }
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("store", "truncation", "background", "previous_response_id", "conversation", "prompt"),
        *("metadata", "user", "safety_identifier", "service_tier", "max_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("client_metadata", "context_management"),
    }
)
_LOGPROBS: Final = "message.output_text.logprobs"
_SAME_CHOICE: Final = frozenset({"auto", "none", "required"})
_CHAT_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def chat_request(fields: Item) -> Item:
    """Translate a Responses request.

    Args:
        fields: the parsed request.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured or is not served.
    """
    refuse_fields(fields)
    refuse_fields(fields, _RULES)
    for name, instead in _CHAT_FIELDS.items():
        if fields.get(name) is not None:
            raise unsupported(
                name, f"`{name}` is a field of Chat Completions. Send `{instead}` instead."
            )
    turns = fields.get("input")
    if isinstance(turns, list):
        refuse_turns([turn for turn in turns if isinstance(turn, dict)], "input")
    messages = messages_of(turns, fields.get("instructions"))
    refuse_prefill(messages[-1], "input")
    kept = fields.keys() - _TRANSLATED - _WITHOUT_EFFECT
    chat = {name: value for name, value in fields.items() if name in kept and value is not None}
    return {**chat, "messages": messages, **_tools(fields), **_options(fields)}


def parameter_of(chat_parameter: str | None) -> str | None:
    """Give the Responses name of the field that an engine found at fault."""
    return None if chat_parameter is None else _CHAT_NAMES.get(chat_parameter, chat_parameter)


def echo_of(fields: Item) -> Item:
    """Give what a response says again of its request."""
    reasoning = _object(fields, "reasoning") or {}
    again: Item = {
        name: fields.get(name)
        for name in (
            *("instructions", "max_output_tokens", "max_tool_calls", "temperature", "top_p"),
            *("user", "safety_identifier", "prompt_cache_key"),
        )
    }
    return {
        **again,
        "background": False,
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}, **(_object(fields, "text") or {})},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_logprobs": fields.get("top_logprobs") or 0,
        "truncation": "disabled",
    }


def _options(fields: Item) -> Item:
    """Translate what shapes the answer, tools apart."""
    options: Item = {}
    if (limit := fields.get("max_output_tokens")) is not None:
        if type(limit) is not int or limit < 1:
            raise malformed("`max_output_tokens` must be at least 1.", "max_output_tokens")
        options["max_completion_tokens"] = limit
    form = (_object(fields, "text") or {}).get("format")
    if form is not None:
        options.update(_response_format(form))
    effort = (_object(fields, "reasoning") or {}).get("effort")
    if effort is not None:
        options["reasoning_effort"] = effort
    include = fields.get("include")
    if include is not None and not isinstance(include, list):
        raise malformed("`include` must be a list.", "include")
    if include and _LOGPROBS in include:
        options["logprobs"] = True
        if fields.get("top_logprobs") is not None:
            options["top_logprobs"] = fields["top_logprobs"]
    return options


def _response_format(form: object) -> Item:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind == "json_schema" and isinstance(form, dict):
        schema = {name: form[name] for name in form if name != "type" and form[name] is not None}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise _unknown_kind("text.format", kind, ("text", "json_object", "json_schema"))


def _tools(fields: Item) -> Item:
    """Translate the tools and the choice among them."""
    found: Item = {}
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise malformed("`tools` must be a list.", "tools")
    if tools:
        found["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = fields.get("tool_choice")
    if choice is None:
        return found
    if isinstance(choice, str) and choice in _SAME_CHOICE:
        return {**found, "tool_choice": choice}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind != "function" or not isinstance(choice, dict):
        raise _unknown_kind("tool_choice", kind, (*sorted(_SAME_CHOICE), "function"))
    name = _name(choice, "tool_choice")
    return {**found, "tool_choice": {"type": "function", "function": {"name": name}}}


def _tool(tool: object, where: str) -> Item:
    """Translate a tool from the flat shape; only functions are the caller's own to run."""
    if not isinstance(tool, dict):
        raise malformed(f"`{where}` must be an object.", where)
    if tool.get("type") != "function":
        raise unsupported(
            where,
            f"`{where}` is a tool of type {tool.get('type')!r}. No tools are hosted here, and of "
            "the others only functions are served: offer it as a tool of type 'function' and run "
            "it yourself.",
        )
    function: Item = {"name": _name(tool, where)}
    for name in ("description", "parameters"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _name(holder: Item, where: str) -> str:
    name = holder.get("name")
    if not isinstance(name, str) or not name:
        raise malformed(f"`{where}.name` must be text.", f"{where}.name")
    return name


def _object(fields: Item, name: str) -> Item | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise malformed(f"`{name}` must be an object.", name)
    return value


def _unknown_kind(where: str, kind: object, served: Iterable[str]) -> HttpRefusal:
    return unsupported(where, f"`{where}` of type {kind!r} is not served; {', '.join(served)} are.")
