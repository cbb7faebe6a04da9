"""Settings of a service: flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource
from pydantic_settings import SettingsError as SourceError

from octavo.service.address import split_address


class SettingsError(Exception):
    """The settings cannot be used; the message names each fault, one a line."""


class ServiceSettings(BaseSettings):
    """Base of a service's settings.

    Each field is also a variable with the model's `env_prefix` and a key of the service's table in the
    TOML file that the field `config_file` names. Unknown keys are errors in all three.
    """

    table: ClassVar[str]
    """Name of the table in the TOML file."""

    if TYPE_CHECKING:
        # Each service has this field, with a default of its own.
        listen: str

    @property
    def host(self) -> str:
        """Host of `listen`, without the brackets of an IPv6 address."""
        return split_address(self.listen)[0]

    @property
    def port(self) -> int:
        """Port of `listen`."""
        return split_address(self.listen)[1]

    @model_validator(mode="after")
    def _can_listen(self) -> Self:
        split_address(self.listen, "listen")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, then the file that one of them names."""
        del dotenv_settings, file_secret_settings
        given = init_settings.init_kwargs if isinstance(init_settings, InitSettingsSource) else {}
        config_file = given.get("config_file") or os.environ.get(f"{cls._prefix()}CONFIG_FILE")
        table = cls._read_table(Path(config_file)) if config_file else {}
        return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    @classmethod
    def load(cls, flags: Mapping[str, Any]) -> Self:
        """Return the settings in force; `flags` holds only what was given.

        Raises:
            SettingsError: a key is unknown or a value is wrong; the message names each, one a line.
        """
        prefix = cls._prefix()
        unknown = sorted(
            name
            for name in os.environ
            if name.startswith(prefix) and name.removeprefix(prefix).lower() not in cls.model_fields
        )
        if unknown:
            raise SettingsError(f"unknown in the environment: {', '.join(unknown)}")
        try:
            return cls(**flags)
        except ValidationError as error:
            raise SettingsError("\n".join(map(_describe, error.errors()))) from None
        except SourceError as error:
            raise SettingsError(f"in the environment: {error}") from None

    @classmethod
    def _prefix(cls) -> str:
        return str(cls.model_config["env_prefix"])

    @classmethod
    def _read_table(cls, path: Path) -> dict[str, Any]:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: {error}") from None
        table = tables.get(cls.table, {})
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {cls.table} must be a table")
        return table


def _describe(error: ErrorDetails) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{where}: no such setting"
    problem = error["msg"].removeprefix("Value error, ")
    return f"{where}: {problem}, got {error['input']!r}" if where else problem
