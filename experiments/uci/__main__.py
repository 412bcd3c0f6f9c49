"""`python -m experiments.uci`."""

from experiments.reproduction import show
from experiments.uci.run import main

if __name__ == "__main__":
    show(main())
