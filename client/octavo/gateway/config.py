"""Settings of the gateway, in sections: flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, model_validator

from octavo._sdk.channel import DEFAULT_ENDPOINT, parse_endpoints
from octavo.errors import InvalidRequestError
from octavo.service.followed import warn_if_exposed
from octavo.service.settings import Count, ProcessSection, Seconds, Section, ServerSection, ServiceSettings

# Below the 16 MiB of a gRPC message: a body is text, and the message around it needs room.
_MAX_BODY: Final = 15 << 20


class GatewayServerSection(ServerSection):
    """Where clients find it, and what they may do to it."""

    listen: str = Field("127.0.0.1:8000", description="address of the HTTP port, as host:port")
    max_body_bytes: Annotated[int, Field(ge=1024, le=_MAX_BODY)] = Field(
        8 << 20, description="largest request body"
    )
    max_receiving_bytes: Annotated[int, Field(ge=_MAX_BODY)] = Field(
        256 << 20, description="most of bodies that are coming in at once; one address has half of it"
    )
    max_connections: Annotated[int, Field(ge=2)] = Field(
        16_384,
        description="most connections; one address has half of them, and few descriptors leave fewer",
    )
    max_rss_bytes: Count | None = Field(
        None,
        description="resident memory at which new requests are refused "
        "(default: 80 % of what the machine, or the container, has)",
    )
    head_timeout_s: Seconds = Field(20.0, description="longest time that a client takes to send its headers")
    read_timeout_s: Seconds = Field(30.0, description="longest time that a client takes to send a body")
    write_timeout_s: Seconds = Field(
        30.0, description="a client that reads nothing for so long is cut off, and its request cancelled"
    )
    keep_alive_s: Annotated[int, Field(ge=1)] = Field(75, description="how long an idle connection is kept")


class SchedulerSection(Section):
    """Whom it passes requests on to."""

    endpoint: str = Field(
        default_factory=lambda: os.environ.get("OCTAVO_ENDPOINT") or DEFAULT_ENDPOINT,
        description="scheduler, as host:port; several, separated by commas, stand in for each other "
        f"(default: $OCTAVO_ENDPOINT or {DEFAULT_ENDPOINT})",
    )
    api_key_file: Path | None = Field(
        None, description="file with the gateway's own key; requests run under their clients' keys"
    )
    reconnect_timeout_s: Seconds = Field(
        30.0, description="how long running responses wait for a scheduler that was lost"
    )
    connect_timeout_s: Seconds = Field(
        2.0, description="how long requests wait for a scheduler while there has been none yet"
    )

    def own_key(self) -> str | None:
        """Return the key with which the gateway connects; None: the one in OCTAVO_API_KEY, or none.

        Raises:
            OSError: the file cannot be read.
        """
        if self.api_key_file is None:
            return None
        warn_if_exposed(self.api_key_file)
        return self.api_key_file.read_text(encoding="utf-8").strip()

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        try:
            parse_endpoints(self.endpoint)
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        return self


class GatewayProcessSection(ProcessSection):
    """How the process behaves."""

    drain_grace_s: Annotated[int, Field(ge=0)] = Field(
        30, description="seconds that running responses get after SIGTERM"
    )


class GatewaySettings(ServiceSettings):
    """Everything that can be set of a gateway."""

    service: ClassVar[str] = "gateway"

    server: GatewayServerSection
    scheduler: SchedulerSection
    process: GatewayProcessSection
