"""The UCI table of the paper: reproduced with the authors' protocol, then with our own method."""
