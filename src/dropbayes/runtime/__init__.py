"""What surrounds the mathematics: devices, progress displays, arrays of other libraries. Nothing here knows of dropout."""
