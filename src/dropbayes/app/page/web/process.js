/** Exact Gaussian process regression, Y | F ~ N(F, 1/tau) with F ~ N(0, K) [GG16, eq:generative_model_reg]. */
import { covarianceMatrix, priorVariances } from "./covariances.js";

/** @typedef {import("./covariances.js").Covariance} Covariance */

const JITTER = 1e-8; // of the mean prior variance, for points that lie on each other

/**
 * The posterior mean and epistemic variance at `at`, each `[at]`.
 * @param {Covariance} covariance @param {ArrayLike<number>} x @param {ArrayLike<number>} y
 * @param {number} precision tau @param {ArrayLike<number>} at
 */
export function posterior(covariance, x, y, precision, at) {
  const n = x.length;
  const prior = priorVariances(covariance, at);
  if (n === 0) return { mean: new Float64Array(at.length), variance: prior };
  const matrix = covarianceMatrix(covariance, x, x);
  let trace = 0;
  for (let i = 0; i < n; i += 1) trace += matrix[i * n + i];
  for (let i = 0; i < n; i += 1) matrix[i * n + i] += 1 / precision + (JITTER * trace) / n;
  cholesky(matrix, n);
  const weights = solveLower(matrix, n, Float64Array.from(y));
  const cross = covarianceMatrix(covariance, at, x);
  const mean = new Float64Array(at.length);
  const variance = prior.slice();
  for (let row = 0; row < at.length; row += 1) {
    const solved = solveLower(matrix, n, cross.slice(row * n, (row + 1) * n));
    for (let i = 0; i < n; i += 1) {
      mean[row] += solved[i] * weights[i];
      variance[row] -= solved[i] * solved[i];
    }
    variance[row] = Math.max(variance[row], 0);
  }
  return { mean, variance };
}

/**
 * The lower Cholesky factor, in place.
 * @param {Float64Array} matrix `[n, n]` @param {number} n
 */
export function cholesky(matrix, n) {
  for (let i = 0; i < n; i += 1) {
    for (let j = 0; j <= i; j += 1) {
      let sum = matrix[i * n + j];
      for (let k = 0; k < j; k += 1) sum -= matrix[i * n + k] * matrix[j * n + k];
      matrix[i * n + j] = i === j ? Math.sqrt(Math.max(sum, Number.MIN_VALUE)) : sum / matrix[j * n + j];
    }
  }
}

/**
 * The solution of L z = b, in place of b.
 * @param {Float64Array} factor `[n, n]` @param {number} n @param {Float64Array} b
 */
function solveLower(factor, n, b) {
  for (let i = 0; i < n; i += 1) {
    let sum = b[i];
    for (let k = 0; k < i; k += 1) sum -= factor[i * n + k] * b[k];
    b[i] = sum / factor[i * n + i];
  }
  return b;
}
