"""Small networks, one for each mechanism by which a PyTorch network can be random."""

from tests.sampling.zoo import dropout, hugging_face, random_numbers, sequences, structures
from tests.sampling.zoo.sequences import ScaledAttention
from tests.sampling.zoo.specimens import ZOO, Module, build

__all__ = [
    "ZOO",
    "Module",
    "ScaledAttention",
    "build",
    "dropout",
    "hugging_face",
    "random_numbers",
    "sequences",
    "structures",
]
