"""Sampling parameters: the record on one side, protobuf on the other, in pairs."""

from __future__ import annotations

from typing import Any, Final

from octavo.protocol.scalars import given
from octavo.sampling import SCALARS, SamplingParams, StructuredOutput
from octavo.v1 import common_pb2

_LISTS: Final = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")
_STRUCTURED = ("json_schema", "regex", "grammar", "json_object", "structural_tag", "strict", "compact")


class ProtocolError(ValueError):
    """A message that its sender should not have sent; `field` is its path as in the proto."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Convert; what is None stays unset."""
    message = common_pb2.SamplingParams(
        **{name: getattr(sampling, name) for name in SCALARS},
        **{name: getattr(sampling, name) for name in _LISTS},
        bad_words_token_ids=[common_pb2.TokenSequence(ids=ids) for ids in sampling.bad_words_token_ids],
    )
    if sampling.logit_bias:
        message.logit_bias.update(sampling.logit_bias)
    if sampling.structured is not None:
        message.structured.CopyFrom(structured_to_proto(sampling.structured))
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Convert without checking ranges: that is `SamplingParams.violations()`."""
    fields: dict[str, Any] = {name: given(message, name) for name in SCALARS}
    if message.logit_bias:
        fields["logit_bias"] = dict(message.logit_bias)
    for name in _LISTS:
        if values := getattr(message, name):
            fields[name] = tuple(values)
    if message.bad_words_token_ids:
        fields["bad_words_token_ids"] = tuple([tuple(one.ids) for one in message.bad_words_token_ids])
    if message.HasField("structured"):
        fields["structured"] = structured_from_proto(message.structured)
    return SamplingParams(**fields)


def structured_to_proto(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    """Convert the one constraint that is set."""
    fields: dict[str, Any] = {name: getattr(structured, name) for name in _STRUCTURED}
    if structured.choice is not None:
        fields["choice"] = common_pb2.ChoiceList(values=structured.choice)
    return common_pb2.StructuredOutput(**fields)


def structured_from_proto(message: common_pb2.StructuredOutput) -> StructuredOutput:
    """Convert; raises when no constraint is set."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ProtocolError("structured.kind", "must be set")
    fields: dict[str, Any] = {name: given(message, name) for name in ("strict", "compact")}
    fields[kind] = tuple(message.choice.values) if kind == "choice" else getattr(message, kind)
    return StructuredOutput(**fields)
