"""`python -m dropbayes.experiments.uci`."""

from dropbayes.experiments.reproduction import show
from dropbayes.experiments.uci.run import main

if __name__ == "__main__":
    show(main())
