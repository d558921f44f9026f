"""``batchwright serve --demo``: one small encoder, one load, three policies side by side on a page."""

from .encoder import DemoEncoder as DemoEncoder
from .load import Demo as Demo
from .load import make_demo_app as make_demo_app

__all__ = ["Demo", "DemoEncoder", "make_demo_app"]
