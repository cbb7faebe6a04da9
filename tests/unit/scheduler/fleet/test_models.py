"""Names of models: who may serve under which, and what a request means by one."""

from __future__ import annotations

from typing import Any, cast

import pytest
from octavo.protocol.convert_sampling import sampling_to_proto
from octavo.sampling import SamplingParams
from octavo.v1 import worker_pb2

from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import IncompatibleWorker, ModelRegistry
from scheduler_svc.text.detokenizer import Detokenizer
from scheduler_svc.text.tokenizer_pool import TokenizerPool


class NoText:
    """A pool of tokenizers that takes every model."""

    async def load(self, spec: object) -> Detokenizer:
        return cast("Detokenizer", spec)


def registry() -> ModelRegistry:
    return ModelRegistry(cast("TokenizerPool", NoText()))


def worker(
    worker_id: str,
    model: str = "hf",
    *aliases: str,
    revision: str = "1",
    temperature: float = 1.0,
    **fields: Any,
) -> worker_pb2.WorkerDescription:
    return worker_pb2.WorkerDescription(
        worker_id=worker_id,
        model_id=model,
        aliases=aliases,
        revision=revision,
        geometry=worker_pb2.Geometry(block_size=16, num_blocks=1),
        tokenizer_files=[worker_pb2.TokenizerFile(name="tokenizer.json")],
        generation_defaults=sampling_to_proto(SamplingParams(temperature=temperature)),
        **fields,
    )


async def test_model_is_found_by_each_of_its_names() -> None:
    models = registry()
    model = await models.claim(worker("w0", "chat", "gpt-4", "default"))

    assert [models.find(name).model for name in ("chat", "gpt-4", "default", "")] == [model] * 4
    assert models.peek("gpt-4") is model


async def test_unknown_name_is_answered_with_all_that_there_are() -> None:
    models = registry()
    await models.claim(worker("w0", "chat", "gpt-4", adapters=["poet"]))

    with pytest.raises(ServiceError) as refused:
        models.find("gpt-5")
    assert refused.value.message == "no model 'gpt-5' here; there is chat, gpt-4, poet"
    assert models.peek("gpt-5") is None


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (worker("w1", "chat"), "it serves the model as chat, the others as chat, gpt-4"),
        (worker("w1", "chat", "gpt-5"), "it serves the model as chat, gpt-5, the others as chat, gpt-4"),
        (worker("w1", "gpt-4", "chat"), "workers of one model must have the same names"),
        (worker("w1", "other", "gpt-4", revision="2"), "gpt-4 is a name of another"),
        (
            worker("w1", "other", "poet", revision="2"),
            "its model poet has the name of another model's adapter",
        ),
        (
            worker("w1", "other", revision="2", adapters=["gpt-4"]),
            "its adapter gpt-4 has the name of a model",
        ),
        (worker("w1", "other", "x", adapters=["x"]), "its adapter x has the name of a model"),
    ],
)
async def test_worker_whose_names_could_mean_two_things_is_refused(
    other: worker_pb2.WorkerDescription, problem: str
) -> None:
    models = registry()
    await models.claim(worker("w0", "chat", "gpt-4", adapters=["poet"]))

    with pytest.raises(IncompatibleWorker, match=problem):
        await models.claim(other)
    assert [model.id for model in models] == ["chat"]


async def test_workers_with_the_same_names_serve_together() -> None:
    models = registry()
    first = await models.claim(worker("w0", "chat", "a", "b"))

    assert await models.claim(worker("w1", "chat", "b", "a")) is first


async def test_worker_that_comes_back_alone_may_have_other_names_and_defaults() -> None:
    models = registry()
    description = worker("w0", "chat", "a", temperature=0.5)
    model = await models.claim(description)
    models.release(description)

    assert await models.claim(worker("w0", "chat", "b", temperature=0.25)) is model
    assert (model.names, model.defaults.temperature) == (("chat", "b"), 0.25)


async def test_model_that_was_renamed_leaves_its_names_to_its_successor() -> None:
    models = registry()
    before = worker("w0", "hf")
    await models.claim(before)
    models.release(before)
    after = worker("w0", "chat", "hf")
    model = await models.claim(after)

    assert models.find("hf").model is model
    assert [one.id for one in models] == ["chat"]

    models.release(after)
    back = await models.claim(worker("w0", "hf"))
    assert models.find("hf").model is back
    assert [one.names for one in models] == [("chat",), ("hf",)]
