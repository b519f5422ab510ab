"""How the lines of the log look: as text, or each as a JSON object for programs that read logs."""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonLine(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, and its own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC)
        told = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return json.dumps(told, default=str)


def use(log_format: LogFormat) -> None:
    """Let all lines of the log, from now on, have this format."""
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLine())
