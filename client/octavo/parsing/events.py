"""What is found in the text of one choice, in its order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts before the words."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the arguments of the call that was begun last."""

    text: str


Event = Content | Reasoning | CallBegun | CallArguments


@dataclass(slots=True)
class Part:
    """Events of one kind that follow each other. A call has a name, and its arguments as `text`."""

    kind: type[Content | Reasoning | CallBegun]
    text: str
    name: str = ""


def parts(events: Iterable[Event]) -> list[Part]:
    """Return events as few parts: how the text came in pieces does not show."""
    found: list[Part] = []
    for event in events:
        match event:
            case CallBegun(name):
                found.append(Part(CallBegun, "", name))
            case CallArguments(text):
                found[-1].text += text
            case Content(text) | Reasoning(text):
                if found and found[-1].kind is type(event):
                    found[-1].text += text
                else:
                    found.append(Part(type(event), text))
    return found
