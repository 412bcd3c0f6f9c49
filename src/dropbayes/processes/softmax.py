r"""The softmax Gaussian process of several classes, by Laplace's approximation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.processes.pairs import Covariance, check_covariance
from dropbayes.runtime.validation import check_count, class_labels


@dataclass(frozen=True)
class SoftmaxProcess:
    r"""The Laplace posterior of one latent function per class (Rasmussen and Williams 2006, section 3.5)."""

    covariance: Covariance  # the same for every class
    x: Tensor
    residual: Tensor  # y - π at the mode, [row, class]
    noise: Tensor  # (W⁻¹ + K)⁻¹ over rows and classes, [class, row, class, row]
    log_marginal_likelihood: float

    def mean(self, x: Tensor) -> Tensor:
        """The latent means, `[row, class]`."""
        return (self.covariance(x.to(self.x), self.x) @ self.residual).to(x)

    def latent_covariance(self, x: Tensor) -> Tensor:
        """The covariance of the latent functions at each row, `[row, class, class]`."""
        cross = self.covariance(x.to(self.x), self.x)
        prior = torch.diag_embed(self.covariance.diagonal(x.to(self.x))[:, None].expand(-1, self.residual.shape[1]))
        return prior - torch.einsum("nr,crds,ns->ncd", cross, self.noise, cross)

    def probabilities(self, x: Tensor, *, n_draws: int = 1000, seed: int = 0) -> Tensor:
        """The class probabilities, the softmax averaged over draws of the latent functions: `[row, class]`."""
        covariance, generator = self.latent_covariance(x), torch.Generator().manual_seed(seed)
        unit = covariance.diagonal(dim1=-2, dim2=-1).mean().clamp_min(1e-12)
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        root = torch.linalg.cholesky(covariance + 1e-8 * unit * eye)
        noise = torch.randn(n_draws, len(x), len(eye), 1, generator=generator, dtype=torch.float64, device="cpu")
        return (self.mean(x) + (root @ noise.to(root)).squeeze(-1)).softmax(-1).mean(0).to(x)


def softmax_process(
    covariance: Covariance, x: Tensor, labels: Tensor, *, n_classes: int | None = None
) -> SoftmaxProcess:
    r"""The posterior of $\mathbf F \sim \mathcal N(0, \mathbf K)$ per class given softmax labels.

    [GG16, eq:generative_model_class], by Laplace's approximation: Newton's method to the mode of the latent functions
    (Rasmussen and Williams 2006, algorithm 3.3), in $\mathcal O(C N^3)$ and float64. The labels `[row]` count from 0.

    Example:
        >>> from dropbayes.processes import Cosine
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> process = softmax_process(Cosine(0.5), x, torch.tensor([0, 1, 2]))
        >>> process.probabilities(x).argmax(-1).tolist()
        [0, 1, 2]
    """
    check_covariance(covariance)
    labels = class_labels(labels, n_rows=len(x), n_classes=2**31 if n_classes is None else n_classes)
    n_classes = int(labels.max()) + 1 if n_classes is None else n_classes
    check_count("n_classes", n_classes, at_least=2)
    x = x.double()
    prior = covariance(x)
    prior = prior + 1e-10 * prior.diagonal().mean() * torch.eye(len(x)).to(x)  # so that it factorises
    y = torch.nn.functional.one_hot(labels, n_classes).T.to(x)  # [class, row]
    a, latent, before = torch.zeros_like(y), torch.zeros_like(y), -torch.inf
    for _ in range(201):  # Newton's steps and the first point: a few are enough, unless the classes are separated
        pi = latent.softmax(0)
        noise, log_determinant = _noise(prior, pi)
        value = float(-0.5 * (a * latent).sum() + (y * latent).sum() - latent.logsumexp(0).sum())
        if abs(value - before) < 1e-10:
            break
        before = value
        b = pi * latent - pi * (pi * latent).sum(0) + y - pi  # W f + y - π
        a = b - torch.einsum("crds,ds->cr", noise, b @ prior)
        latent = a @ prior
    return SoftmaxProcess(covariance, x, (y - pi).T, noise, value - 0.5 * float(log_determinant))


def _noise(prior: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
    r"""$(\mathbf W^{-1} + \mathbf K)^{-1}$ and $\log|\mathbf I + \mathbf K\mathbf W|$, without inverting $\mathbf W$.

    The former is $\mathbf E - \mathbf E \mathbf R (\sum_c \mathbf E_c)^{-1} \mathbf R^T \mathbf E$ with $\mathbf E_c =
    \mathbf D_c^{1/2} (\mathbf I + \mathbf D_c^{1/2} \mathbf K \mathbf D_c^{1/2})^{-1} \mathbf D_c^{1/2}$.
    """
    n_classes, n_rows = pi.shape
    eye = torch.eye(n_rows, dtype=prior.dtype, device=prior.device)
    half = pi.clamp_min(1e-300).sqrt()
    roots = torch.linalg.cholesky(eye + half[:, :, None] * prior * half[:, None, :])
    scaled = torch.linalg.solve_triangular(roots, torch.diag_embed(half), upper=False)
    blocks = scaled.mT @ scaled  # E_c
    total = torch.linalg.cholesky(blocks.sum(0))
    solved = torch.cholesky_solve(blocks.transpose(0, 1).reshape(n_rows, -1), total).reshape(n_rows, n_classes, n_rows)
    noise = -torch.einsum("crs,sdt->crdt", blocks, solved)
    noise.diagonal(dim1=0, dim2=2).add_(blocks.movedim(0, -1))
    log_determinant = 2 * (roots.diagonal(dim1=-2, dim2=-1).log().sum() + total.diagonal().log().sum())
    # |I + KW| = prod_c |B_c| |Σ_c E_c| / prod |D|: Σ_c D_c = I, so the last factor is 1.
    return noise, log_determinant
