"""Chat templates: what Hugging Face's take, and nothing that could harm the service."""

from __future__ import annotations

import json
from typing import Any

import pytest
from octavo.v1 import generation_pb2 as pb
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from scheduler_svc.text.chat import ChatTemplate, InputError, output_formats

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(source: str, messages: Any, **fields: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(pb.Chat(messages=messages, **fields), max_chars=1000)


def refusal(source: str, messages: Any, **fields: Any) -> tuple[str, str, str]:
    with pytest.raises(InputError) as caught:
        render(source, messages, **fields)
    return caught.value.field, caught.value.reason, caught.value.problem


USER = [{"role": "user", "content": "hi"}]


def test_template_gets_messages_special_tokens_and_generation_prompt() -> None:
    assert render("{{ bos_token }}" + CHATML, USER) == "<s><|user|>hi<|assistant|>"
    assert render(CHATML, USER, add_generation_prompt=False) == "<|user|>hi"


def test_template_gets_variables_and_tools_as_json() -> None:
    source = "{{ tools | tojson }} {{ style }} {{ tools | tojson(indent=1) | length }}"
    tools = [{"type": "function", "function": {"name": "f<b>"}}]
    text = render(source, USER, tools_json=json.dumps(tools), template_vars_json='{"style": "terse"}')
    assert text.startswith('[{"type": "function", "function": {"name": "f<b>"}}] terse')


def test_template_gets_tool_calls_with_parsed_arguments() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "assistant", "tool_calls_json": json.dumps([call])},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
    ]
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}{{ messages[1].name }}"
    assert render(source, messages) == "1f"


def test_template_may_use_what_transformers_offers() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert render(source, [*USER, {"role": "assistant", "content": "yo"}]) == "yo4"


def test_template_that_refuses_is_quoted() -> None:
    field, reason, problem = refusal("{{ raise_exception('roles must alternate') }}", USER)
    assert (field, reason) == ("chat", "CHAT_TEMPLATE")
    assert "roles must alternate" in problem


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ messages[7].content.upper() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'x' %}",
    ],
    ids=["syntax", "undefined", "dunder", "mutation", "arithmetic", "long range", "include"],
)
def test_broken_template_is_the_requests_error(source: str) -> None:
    field, reason, _ = refusal(source, USER)
    assert (field, reason) == ("chat", "CHAT_TEMPLATE")


def test_prompt_without_end_is_cut_off() -> None:
    endless = "{% for i in range(99999) %}xxxxxxxxxx{% endfor %}"
    assert refusal(endless, USER)[:2] == ("chat", "PROMPT_TOO_LONG")


def test_role_is_a_usual_one_or_one_the_template_names() -> None:
    wizard = [{"role": "wizard", "content": "abracadabra"}]
    field, _, problem = refusal(CHATML, wizard)
    assert field == "chat.messages[0].role"
    assert "system, user, assistant, tool" in problem
    assert render("{% if messages[0].role == 'wizard' %}yes{% endif %}", wizard) == "yes"
    assert refusal("{{ '' }}", [{"role": "", "content": ""}])[0] == "chat.messages[0].role"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools_json": "{}"}, "chat.tools_json"),
        ({"tools_json": "[1,"}, "chat.tools_json"),
        ({"tools_json": "[" * 100_000}, "chat.tools_json"),
        ({"template_vars_json": "3"}, "chat.template_vars_json"),
        ({"template_vars_json": '{"messages": []}'}, "chat.template_vars_json"),
    ],
)
def test_json_that_is_wrong_is_named(fields: dict[str, str], field: str) -> None:
    assert refusal(CHATML, USER, **fields)[0] == field


def test_no_messages_is_named() -> None:
    assert refusal(CHATML, [])[0] == "chat.messages"


def test_template_without_tools_has_them_told_in_words() -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    turns = [
        *USER,
        {"role": "assistant", "tool_calls_json": json.dumps([call])},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]

    text = render(CHATML, turns, tools_json=json.dumps([tool]))

    assert text.startswith("<|system|>")
    assert '<tools>[{"name": "now", "parameters": {}}]</tools>' in text
    assert '<tool_call>[{"name": "now", "arguments": {"zone": "CET"}}]</tool_call>' in text
    assert "<|tool|>noon" in text
    assert output_formats(CHATML) == ("hermes", "")
    assert output_formats("{{ tools }}") == ("", "")


def test_thoughts_are_given_to_the_template_under_the_names_that_templates_have() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ messages[0].content }}"

    assert render(source, [{"role": "assistant", "content": "c", "reasoning": "a"}]) == "aac"


@pytest.mark.parametrize("last", ["Well, ", " Well,", "Well"])
@pytest.mark.parametrize("content", ["message.content", "message.content | trim"])
def test_final_message_goes_on_as_transformers_has_it(last: str, content: str) -> None:
    source = "{% for message in messages %}<|{{ message.role }}|>{{ " + content + " }}</s>{% endfor %}"
    turns = [*USER, {"role": "assistant", "content": last}]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source)
    expected = tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    assert render(source, turns, continue_final_message=True) == expected


def test_final_message_that_cannot_go_on_is_refused() -> None:
    turns = [*USER, {"role": "assistant", "content": "Well"}]
    field, _, _ = refusal(CHATML, turns, continue_final_message=True, add_generation_prompt=True)
    assert field == "chat.continue_final_message"
    field, _, _ = refusal(CHATML, [{"role": "user", "content": " "}], continue_final_message=True)
    assert field == "chat.continue_final_message"
    _, reason, _ = refusal("nothing", turns, continue_final_message=True)
    assert reason == "CHAT_TEMPLATE"


def test_template_gets_documents() -> None:
    source = "{% for document in documents %}{{ document.title }};{% endfor %}"
    assert render(source, USER, documents_json='[{"title": "a"}, {"title": "b"}]') == "a;b;"
    assert refusal(source, USER, documents_json="{}")[0] == "chat.documents_json"
    assert render("{{ documents is none }}", USER) == "True"
