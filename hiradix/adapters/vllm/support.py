"""Which vLLM the connector serves. What another one is told names its version."""

from __future__ import annotations

import logging
from importlib import metadata

from hiradix.errors import ConfigError

TESTED = "0.32.0"

logger = logging.getLogger(__name__)


def installed_version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def unsupported(error: ImportError | AttributeError) -> ConfigError:
    """The error for a vLLM that lacks something which the connector needs."""
    return ConfigError(
        f"HiRadixConnector: vLLM {installed_version()} is not supported: {error}. Tested with vLLM {TESTED}"
    )


def warn_if_untested() -> None:
    """Say so where the installed vLLM is none of the tested release."""
    version = installed_version()
    if version.split(".")[:2] != TESTED.split(".")[:2]:
        logger.warning(
            "HiRadixConnector was tested with vLLM %s, this is %s: connectors' API changes between releases",
            TESTED,
            version,
        )
