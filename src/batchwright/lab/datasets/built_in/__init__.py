"""The loaders of built-in data: images of Fashion-MNIST, tables of a formula, texts and windows of Python's source."""

from .fashion import load_fashion as load_fashion
from .formulas import load_formula as load_formula
from .language import load_windows as load_windows
from .texts import load_texts as load_texts

__all__ = ["load_fashion", "load_formula", "load_texts", "load_windows"]
