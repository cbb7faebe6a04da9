"""Conversations to prompts: the model's own Jinja template, sandboxed.

Templates come with models and conversations come from clients: neither is trusted. Rendering runs in
a child process (`tokenization.py`), which bounds its time; its size is bounded here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from octavo.parsing.output import detect
from octavo.v1 import generation_pb2 as pb

ROLES: Final = ("system", "user", "assistant", "tool")
_TOOLS: Final = """You are given functions that you may call:
<tools>{tools}</tools>

To call some of them, answer with nothing but a list of the calls, in this format:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function can help, answer in words."""
"""What a model is told of tools whose template says nothing of them: near to what SmolLM 2 was trained on."""
_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt", "documents"})


class InputError(Exception):
    """What a client sent cannot become a prompt. `field` is its path as in the proto."""

    def __init__(self, field: str, problem: str, reason: str = "INVALID_REQUEST") -> None:
        super().__init__(field, problem, reason)
        self.field = field
        self.problem = problem
        self.reason = reason


def output_formats(source: str) -> tuple[str, str]:
    """Return how the output for a template has calls of tools, and thoughts; "" where that is not known."""
    tools, reasoning = detect(source)
    return (tools if _knows_tools(source) else "hermes"), reasoning


def _knows_tools(source: str) -> bool:
    return "tools" in source


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is just shown."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads this attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean local time


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A model's chat template.

    `special_tokens` are variables that the template may use (bos_token, eos_token, ...). A template
    that does not compile is reported when it is used, so that it harms only those who need it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._broken: str | None = None
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            self._broken = f"the model's chat template does not compile: {error}"

    def render(self, chat: pb.Chat, max_chars: int) -> str:
        """Return the prompt of a conversation.

        Raises:
            InputError: the conversation is not one that the template takes or is longer than
                `max_chars`, or the template fails.
        """
        if self._broken is not None:
            raise InputError("chat", self._broken, "CHAT_TEMPLATE")
        variables = self._variables(chat)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > max_chars:
                    raise InputError(
                        "chat", f"the prompt is longer than {max_chars} characters", "PROMPT_TOO_LONG"
                    )
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise InputError(
                "chat", f"the model's chat template refuses it: {_say(error)}", "CHAT_TEMPLATE"
            ) from None
        text = "".join(parts)
        return _open_ended(text, chat.messages[-1].content) if chat.continue_final_message else text

    def _variables(self, chat: pb.Chat) -> dict[str, object]:
        if not chat.messages:
            raise InputError("chat.messages", "must not be empty")
        variables = _json(chat, "template_vars_json", "chat", dict) or {}
        taken = sorted(_OWN_VARIABLES & variables.keys())
        if taken:
            raise InputError("chat.template_vars_json", f"must not set {', '.join(taken)}")
        continues = chat.continue_final_message
        if continues and chat.add_generation_prompt:
            raise InputError("chat.continue_final_message", "does not go with add_generation_prompt")
        if continues and not chat.messages[-1].content.strip():
            raise InputError("chat.continue_final_message", "the last message has no text to go on with")
        add_generation_prompt = (
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
        )
        messages = [self._message(index, message) for index, message in enumerate(chat.messages)]
        tools = _json(chat, "tools_json", "chat", list)
        if not _knows_tools(self._source):
            messages = _with_tools(messages, tools)
        return {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": _json(chat, "documents_json", "chat", list),
            "add_generation_prompt": add_generation_prompt,
        }

    def _message(self, index: int, message: Any) -> dict[str, Any]:
        path = f"chat.messages[{index}]"
        if not self._takes_role(message.role):
            raise InputError(f"{path}.role", f"must be one of {', '.join(ROLES)}, got {message.role!r}")
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        for name in ("name", "tool_call_id"):
            if message.HasField(name):
                turn[name] = getattr(message, name)
        if message.HasField("reasoning"):
            # What templates call it: Qwen's and DeepSeek's, and that of gpt-oss.
            turn["reasoning_content"] = turn["thinking"] = message.reasoning
        calls = _json(message, "tool_calls_json", path, list)
        if calls is not None:
            turn["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return turn

    def _takes_role(self, role: str) -> bool:
        """Return whether a role is a usual one or one that the template names."""
        return role in ROLES or (role.isidentifier() and any(q + role + q in self._source for q in "'\""))


def _open_ended(prompt: str, last: str) -> str:
    """Return a prompt up to the end of its last message, as transformers has it: templates end messages."""
    at = prompt.rfind(last.strip())
    if at < 0:
        problem = "the model's chat template does not show the last message as it is"
        raise InputError("chat.continue_final_message", problem, "CHAT_TEMPLATE")
    end = at + len(last.lstrip())
    # A template that strips messages has no space there to go on with.
    return prompt[:end] if prompt[at:end] == last.lstrip() else prompt[: at + len(last.strip())]


def _with_tools(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
    """Return a conversation that says in words which tools there are and which were called."""
    told = [
        {**turn, "content": f"{turn['content']}<tool_call>{_tojson(_called(turn))}</tool_call>"}
        if turn.get("tool_calls")
        else turn
        for turn in messages
    ]
    if not tools:
        return told
    offer = _TOOLS.format(tools=_tojson([_function(tool) for tool in tools]))
    if told[0]["role"] != "system":
        return [{"role": "system", "content": offer}, *told]
    return [{**told[0], "content": f"{told[0]['content']}\n\n{offer}"}, *told[1:]]


def _called(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    functions = [_function(call) for call in turn["tool_calls"]]
    return [{name: one.get(name) for name in ("name", "arguments")} for one in functions]


def _function(given: Any) -> dict[str, Any]:
    """Return the function of a tool or of a call, which the OpenAI API puts into an object of its own."""
    found = given.get("function", given) if isinstance(given, dict) else {}
    return found if isinstance(found, dict) else {}


def _json(message: Any, name: str, path: str, kind: type) -> Any:
    """Return the parsed value of an optional JSON field, or None when it is unset."""
    if not message.HasField(name):
        return None
    field = f"{path}.{name}"
    try:
        value = json.loads(getattr(message, name))
    except ValueError as error:
        raise InputError(field, f"is not JSON: {error}") from None
    except RecursionError:
        raise InputError(field, "is nested too deeply") from None
    if not isinstance(value, kind):
        raise InputError(field, f"must be a JSON {'object' if kind is dict else 'list'}")
    return value


def _with_parsed_arguments(call: Any) -> Any:
    """Templates expect the arguments of a tool call as an object; the OpenAI API sends them as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__
