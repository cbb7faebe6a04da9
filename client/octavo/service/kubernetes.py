"""The variables that Kubernetes sets in every pod for each Service of its namespace.

A Service called `octavo-gateway` brings OCTAVO_GATEWAY_PORT and more, and so do the gateway's settings begin.
"""

from __future__ import annotations

import re
from typing import Final

_IP: Final = r"[0-9a-fA-F.:]+"
_URL: Final = r"(?:tcp|udp|sctp)://\S+:\d+"
_OF_PORT: Final = r".+_PORT_\d+_(?:TCP|UDP|SCTP)"
_FORMS: Final = (
    (r".+_SERVICE_HOST", _IP),
    (r".+_SERVICE_PORT(?:_[A-Z0-9_]+)?", r"\d+"),
    (r".+_PORT", _URL),
    (_OF_PORT, _URL),
    (_OF_PORT + "_ADDR", _IP),
    (_OF_PORT + "_PORT", r"\d+"),
    (_OF_PORT + "_PROTO", r"tcp|udp|sctp"),
)
"""How names and their values look; the Kubernetes documentation tells it under "Discovering services"."""


def is_injected(name: str, value: str) -> bool:
    """Return whether a variable is one that Kubernetes sets for a Service."""
    return any(re.fullmatch(form, name) and re.fullmatch(values, value) for form, values in _FORMS)
