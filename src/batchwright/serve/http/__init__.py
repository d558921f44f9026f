"""Batchers as an HTTP server: deadlines and priorities in headers, metrics, health checks, limits, drain at the end."""

from .app import make_app as make_app
from .connections import limited_protocol as limited_protocol
from .limits import Limits as Limits

__all__ = ["Limits", "limited_protocol", "make_app"]
