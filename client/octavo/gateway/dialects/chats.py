"""Chats that another API's bodies mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from octavo.gateway.errors import GatewayError, failure_of_validation
from octavo.gateway.schemas import ChatRequest


def chat_of(wanted: Mapping[str, Any]) -> ChatRequest:
    """Return the chat of parameters of /v1/chat/completions; None leaves one out.

    Raises:
        GatewayError: a chat cannot be like this.
    """
    try:
        return ChatRequest.model_validate(dict(wanted))
    except ValidationError as error:
        raise GatewayError(failure_of_validation(error.errors())) from None
