"""A batcher as an HTTP server: deadlines and priorities in headers, metrics, health checks, drain at the end."""

from .app import make_app as make_app

__all__ = ["make_app"]
