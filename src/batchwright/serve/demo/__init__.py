"""``batchwright serve --demo``: one small encoder, one load, three policies side by side on a page."""

from .arms import Demo as Demo
from .arms import make_demo_app as make_demo_app
from .encoder import DemoEncoder as DemoEncoder

__all__ = ["Demo", "DemoEncoder", "make_demo_app"]
