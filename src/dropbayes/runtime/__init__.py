"""Infrastructure around the mathematics: arguments, arrays, devices, files, progress displays and the version."""

__version__ = "0.1.0"
