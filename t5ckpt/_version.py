"""The version of the package, which setup.py also reads from this file."""

__all__ = ['__version__']

__version__ = '0.1.0'
