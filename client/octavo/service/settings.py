"""Settings of a service, in sections: flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

import structlog
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from octavo.service import logs
from octavo.service.address import is_loopback, split_address
from octavo.service.kubernetes import is_injected

_log = structlog.get_logger()

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Grace = Annotated[float, Field(ge=0)]
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=128)]

SERVICES: Final = frozenset({"scheduler", "worker", "gateway"})
"""Tables of a settings file; a service reads its own."""

SHARED: Final = frozenset(
    {"insecure", "key_file", "mtls", "tls_ca", "tls_cert", "tls_key", "worker_secret_file"}
)
"""Settings that a variable sets for all services of a machine: OCTAVO_TLS_CA, and so on."""

NONE: Final = BeforeValidator(lambda value: None if value == "none" else value)
"""Takes the text `none` for None, which neither a flag nor TOML can say otherwise."""

COMMAS: Final = BeforeValidator(
    lambda value: [part for part in value.split(",") if part] if isinstance(value, str) else value
)
"""Takes a list as text, with commas between its parts."""


class SettingsError(Exception):
    """The settings cannot be used; the message names each fault, one a line."""


class Section(BaseModel):
    """Settings that serve one part of a service; the docstring is what `--help` says about them."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSection(Section):
    """Where the service is found."""

    listen: str
    """Each service has a default of its own."""
    tls_cert: Path | None = Field(
        None,
        description="certificate, with its chain, in PEM: ports are served over TLS, and it is presented to "
        "services that are called; followed while it changes",
    )
    tls_key: Path | None = Field(None, description="private key of tls_cert")
    tls_ca: Path | None = Field(
        None,
        description="authorities, in PEM, by which others are checked: services are called over TLS, and "
        "with mtls whoever calls presents a certificate of theirs",
    )
    mtls: bool = Field(False, description="refuse connections that present no certificate of tls_ca")
    insecure: bool = Field(
        False, description="serve beyond loopback in plaintext, or a worker to whoever reaches its port"
    )

    @property
    def host(self) -> str:
        """Host of `listen`, without the brackets of an IPv6 address."""
        return split_address(self.listen)[0]

    @property
    def port(self) -> int:
        """Port of `listen`."""
        return split_address(self.listen)[1]

    @property
    def is_reachable(self) -> bool:
        """Whether other machines may reach the port."""
        return not is_loopback(self.host)

    @model_validator(mode="after")
    def _can_listen(self) -> Self:
        split_address(self.listen, "listen")
        if self.is_reachable and self.tls_cert is None and not self.insecure:
            raise ValueError(
                f"listen: {self.listen} can be reached from other machines: set tls_cert and tls_key "
                "(`octavo certs` makes them), or insecure where the network is trusted"
            )
        return self


class ProcessSection(Section):
    """How the process behaves."""

    config_file: Path | None = Field(None, description="TOML file with the settings of this service")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: json unless on a terminal"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )


class ServiceSettings(BaseModel):
    """Base of a service's settings; its fields are sections, and the settings are the fields of those.

    The name of a setting is unique in the service. It names the flag and, with `prefix()` before it, the
    variable; and in the TOML file a key in the table of the section (`[SERVICE.SECTION]`) or in that of the
    service (`[SERVICE]`). Unknown names are errors in all three.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    service: ClassVar[str]
    """Name of the service, and of its table in the TOML file."""

    if TYPE_CHECKING:
        # Each service has this section, with fields of its own.
        process: ProcessSection

    @classmethod
    def prefix(cls) -> str:
        """Return what the names of its variables begin with."""
        return f"OCTAVO_{cls.service.upper()}_"

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return the sections by name."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)
        }

    @classmethod
    def section_of(cls) -> dict[str, str]:
        """Return the section of each setting by its name."""
        return {name: section for section, kind in cls.sections().items() for name in kind.model_fields}

    @classmethod
    def load(cls, flags: Mapping[str, Any]) -> Self:
        """Return the settings in force; `flags` holds only what was given, by name.

        Raises:
            SettingsError: a name is unknown or a value is wrong; the message names each, one a line.
        """
        environment, _ = cls._environment()
        config_file = flags.get("config_file") or environment.get("config_file")
        file, unknown = cls._read(Path(config_file)) if config_file else ({}, [])
        section_of = cls.section_of()
        values: dict[str, dict[str, Any]] = {section: {} for section in cls.sections()}
        for name, value in {**file, **environment, **flags}.items():
            if name in section_of:
                values[section_of[name]][name] = value
                continue
            fault = (
                f"{name}: no such setting"
                if name in flags
                else f"unknown in the environment: {cls.prefix()}{name.upper()}"
            )
            unknown.append(fault + _nearest(name, section_of))
        faults: list[str] = []
        try:
            settings = cls.model_validate(values)
        except ValidationError as error:
            faults = [_describe(fault) for fault in error.errors()]
        if faults or unknown:
            raise SettingsError("\n".join(faults + unknown))
        return settings

    def start_logging(self) -> None:
        """Set up the logs, and name in them the variables that were not taken for settings; call once."""
        logs.configure(self.process.log_format, self.process.log_level)
        _, injected = self._environment()
        if injected:
            _log.info(
                "kubernetes_variables_ignored",
                variables=injected,
                meaning="Kubernetes sets them for Services; they are no settings, and change none",
            )

    def items(self) -> Iterator[tuple[str, Any, FieldInfo]]:
        """Yield the name, the value and the field of each setting."""
        for section, kind in self.sections().items():
            for name, field in kind.model_fields.items():
                yield name, getattr(getattr(self, section), name), field

    @classmethod
    def _environment(cls) -> tuple[dict[str, str], list[str]]:
        """Return the values of variables by the name of the setting, and the variables that are none."""
        shared = {f"OCTAVO_{name.upper()}": name for name in SHARED & cls.section_of().keys()}
        variables = {name.upper(): value for name, value in os.environ.items()}
        own = {
            name: value
            for name, value in variables.items()
            if name.startswith(cls.prefix()) and name not in shared
        }
        injected = sorted(name for name, value in own.items() if is_injected(name, value))
        given = {name: variables[variable] for variable, name in shared.items() if variables.get(variable)}
        given |= {
            name.removeprefix(cls.prefix()).lower(): value
            for name, value in own.items()
            if name not in injected
        }
        return given, injected

    @classmethod
    def _read(cls, path: Path) -> tuple[dict[str, Any], list[str]]:
        """Return the settings of a file by name, and what is wrong with their names."""
        section_of = cls.section_of()
        found: dict[str, tuple[str, Any]] = {}
        faults: list[str] = []
        for place, name, value in cls._entries(path):
            section = section_of.get(name)
            if section is None:
                nearest = _nearest(name, [*section_of, *cls.sections()])
                faults.append(f"{path}: {place}: no such setting{nearest}")
            elif name in found:
                faults.append(f"{path}: {name} is set twice, as {found[name][0]} and as {place}")
            elif place not in (f"{cls.service}.{name}", f"{cls.service}.{section}.{name}"):
                faults.append(f"{path}: {place}: no such setting ({name} is of [{cls.service}.{section}])")
            else:
                found[name] = place, value
        return {name: value for name, (_, value) in found.items()}, faults

    @classmethod
    def _entries(cls, path: Path) -> Iterator[tuple[str, str, Any]]:
        """Yield place, name and value of each key in a file's tables of this service."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            # Not TOML, not UTF-8, an integer of thousands of digits, tables in tables without end.
            raise SettingsError(f"{path}: {error}") from None
        for name in tables.keys() - SERVICES:
            raise SettingsError(f"{path}: [{name}]: no such service{_nearest(name, SERVICES)}")
        top = _table(path, cls.service, tables.get(cls.service, {}))
        for key, value in top.items():
            place = f"{cls.service}.{key}"
            if key in cls.sections():
                section = _table(path, place, value)
                yield from ((f"{place}.{name}", name, inner) for name, inner in section.items())
            else:
                yield place, key, value


def _table(path: Path, place: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: {place} must be a table")
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (nearest: {near[0]})" if near else ""


def _describe(error: ErrorDetails) -> str:
    # The first part is the section, which flags and variables do not name.
    where = ".".join(map(str, error["loc"][1:]))
    problem = error["msg"].removeprefix("Value error, ")
    return f"{where}: {problem}, got {error['input']!r}" if where else problem
