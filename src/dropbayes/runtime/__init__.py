"""What surrounds the mathematics: devices, progress displays, arrays of other libraries."""
