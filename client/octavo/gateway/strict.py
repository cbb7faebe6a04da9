"""Bodies in which every name is known, and what all of them are built of."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from octavo.gateway.errors import CONFLICT, MAX_FAULTS, UNKNOWN, UNSUPPORTED

MAX_TOOLS: Final = 1024
NOTHING: Final = (None,)
FALSE: Final = (None, False)
EMPTY: Final[tuple[Any, ...]] = (None, [], {})
"""Values of an unsupported parameter that ask for nothing: these three are the usual ones."""


class Strict(BaseModel):
    """A body in which every name is known."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported parameter -> values that ask for nothing."""
    _optional: ClassVar[frozenset[str]] = frozenset()
    """Parameters that may be left out."""
    _names: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        known = cls.neutral.keys() & data.keys()
        asked = sorted(name for name in known if not _is_one_of(data[name], cls.neutral[name]))
        if asked:
            raise PydanticCustomError(UNSUPPORTED, "is not supported", {"names": asked})
        unknown = data.keys() - cls._names - known
        if len(unknown) > MAX_FAULTS:
            raise PydanticCustomError(
                UNKNOWN, "unknown parameter", {"names": sorted(islice(unknown, MAX_FAULTS))}
            )
        return {
            name: value
            for name, value in data.items()
            if name not in known and (value is not None or name not in cls._optional)
        }

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls._names = frozenset(fields)
        cls._optional = frozenset(name for name, field in fields.items() if not field.is_required())


def conflict(name: str, problem: str) -> PydanticCustomError:
    """Return the error of a parameter that does not go with another."""
    return PydanticCustomError(CONFLICT, "{problem}", {"problem": problem, "names": [name]})


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    # 0 is no False here, and 1 no True.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
