"""The version, in the one place that setup.py reads it from."""

__all__ = ['__version__']

__version__ = '0.1.0'
