"""The obstore client of the `s3` backend, and what its errors say."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from hiradix.errors import ConfigError
from hiradix.storage.backends.s3.config import S3Config
from hiradix.storage.kit.options import flag

_STATUS = re.compile(r"status code: (\d{3})")
_SENDING = re.compile(r"error sending request|HTTP error|timed? ?out|connection|dns error", re.IGNORECASE)
_OF_VALUES = (
    InvalidPathError, NotFoundError, NotSupportedError, PermissionDeniedError, UnauthenticatedError,
    UnknownConfigurationKeyError,
)  # fmt: skip


def connect(config: S3Config) -> Any:
    """An obstore store. Raises ConfigError; asks nobody."""
    settings = dict(config.settings)
    # No hash of the payload in a request's signature: pages are checked when they are read.
    unsigned = {"unsigned_payload": True} if config.url.startswith("s3://") else {}
    try:
        return from_url(
            config.url,
            config=unsigned | settings,
            client_options={
                "timeout": timedelta(seconds=config.timeout_s),
                "connect_timeout": timedelta(seconds=config.connect_timeout_s),
                "allow_http": str(settings.get("endpoint", "")).startswith("http://"),
            },
            retry_config={
                "max_retries": config.retries,
                "retry_timeout": timedelta(seconds=config.retry_timeout_s),
                "backoff": {"init_backoff": timedelta(milliseconds=50),
                            "max_backoff": timedelta(seconds=1), "base": 2},
            },
        )  # fmt: skip
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{flag('url')}: {error_text(error)}") from error


def is_away(error: BaseException) -> bool:
    """Whether the service does not answer, or says that it cannot serve at the moment; else a value is wrong.

    obstore has one exception for most of it, so its text has to tell.
    """
    text = str(error)
    if isinstance(error, _OF_VALUES) or "certificate" in text.lower():
        return False
    status = _STATUS.search(text)
    if status is not None:
        return int(status[1]) >= 500 or int(status[1]) in (408, 425, 429)
    return _SENDING.search(text) is not None


def error_text(error: BaseException) -> str:
    """An error of obstore in one line, without the dump of its insides or of pages that servers answer."""
    return " ".join(str(error).partition("\n\nDebug source")[0][:1000].split())
