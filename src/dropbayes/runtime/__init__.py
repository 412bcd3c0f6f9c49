"""Infrastructure around the mathematics: arguments, arrays, devices, files, progress displays and the version."""
