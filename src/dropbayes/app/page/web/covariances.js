/**
 * The covariance that a network's non-linearity implies, for one input and any number of hidden layers.
 *
 * K(x, y) = E[sigma(u) sigma(v)] with Gaussian pre-activations u, v [GG16, sect:gp_approx_model], and layer by layer
 * Cov(u, v) = K_below / l^2 + beta^2 for a deep network [GG16, sect:going_deep], where l = 1 after the first layer.
 */

/** @typedef {"relu" | "tanh" | "erf" | "cosine"} Kind */
/** @typedef {{kind: Kind, depth: number, lengthScale: number, biasScale: number}} Covariance */

/**
 * The pre-activations of a pair of inputs: deviations, sine and cosine of their angle, distance over l.
 * @typedef {{u: number, v: number, sine: number, cosine: number, distance: number}} Pair
 */

const HERMITE_TERMS = 128; // odd ones: tanh has no even ones
const HERMITE_STEP = 0.05; // the trapezoidal rule converges geometrically for an analytic function
const HERMITE_RADIUS = 12; // a Hermite function's tail there is below 3e-16

/**
 * The covariance matrix `[x, y]`.
 * @param {Covariance} covariance @param {ArrayLike<number>} x @param {ArrayLike<number>} y
 * @returns {Float64Array}
 */
export function covarianceMatrix(covariance, x, y) {
  let [below, variancesX, variancesY] = [inputProducts(x, y), squares(x), squares(y)];
  for (let at = 0; at < covariance.depth; at += 1) {
    const pair = preactivations(covariance, at, x, y, below, variancesX, variancesY);
    const one = expectedProduct(covariance.kind, deviations(covariance, at, variancesX), deviations(covariance, at, variancesY));
    below = Float64Array.from(below, (_, k) => {
      const [i, j] = [Math.floor(k / y.length), k % y.length];
      return one(pair(i, j), i, j);
    });
    variancesX = layerVariances(covariance, at, variancesX);
    variancesY = layerVariances(covariance, at, variancesY);
  }
  return below;
}

/**
 * The prior variances, `[x]`.
 * @param {Covariance} covariance @param {ArrayLike<number>} x
 * @returns {Float64Array}
 */
export function priorVariances(covariance, x) {
  let variances = squares(x);
  for (let at = 0; at < covariance.depth; at += 1) variances = layerVariances(covariance, at, variances);
  return variances;
}

/** @param {ArrayLike<number>} x @param {ArrayLike<number>} y */
function inputProducts(x, y) {
  return Float64Array.from({ length: x.length * y.length }, (_, k) => x[Math.floor(k / y.length)] * y[k % y.length]);
}

/** @param {ArrayLike<number>} x */
function squares(x) {
  return Float64Array.from(x, (value) => value * value);
}

/**
 * The deviations of the pre-activations of one layer.
 * @param {Covariance} covariance @param {number} at @param {Float64Array} variances of the layer below
 */
function deviations(covariance, at, variances) {
  const l = at === 0 ? covariance.lengthScale : 1;
  return variances.map((variance) => Math.sqrt(variance / (l * l) + covariance.biasScale ** 2));
}

/**
 * The variances of one layer: the pair of an input with itself.
 * @param {Covariance} covariance @param {number} at @param {Float64Array} variances
 */
function layerVariances(covariance, at, variances) {
  const stds = deviations(covariance, at, variances);
  const one = expectedProduct(covariance.kind, stds, stds);
  return stds.map((std, i) => one({ u: std, v: std, sine: 0, cosine: 1, distance: 0 }, i, i));
}

/**
 * The pair (i, j) of one layer. Differences are taken before squares: nothing cancels for near inputs.
 * @param {Covariance} covariance @param {number} at @param {ArrayLike<number>} x @param {ArrayLike<number>} y
 * @param {Float64Array} below @param {Float64Array} variancesX @param {Float64Array} variancesY
 * @returns {(i: number, j: number) => Pair}
 */
function preactivations(covariance, at, x, y, below, variancesX, variancesY) {
  const l = at === 0 ? covariance.lengthScale : 1;
  const beta = covariance.biasScale;
  const [stdsX, stdsY] = [deviations(covariance, at, variancesX), deviations(covariance, at, variancesY)];
  return (i, j) => {
    const product = below[i * y.length + j];
    // Two inputs on a line span no area.
    const area = at === 0 ? 0 : root(variancesX[i] * variancesY[j] - product * product);
    const distance = at === 0 ? Math.abs(x[i] - y[j]) : root(variancesX[i] + variancesY[j] - 2 * product);
    const [u, v] = [stdsX[i], stdsY[j]];
    if (u * v === 0) return { u, v, sine: 1, cosine: 0, distance: distance / l };
    const sine = Math.hypot(area / (l * l), (beta * distance) / l) / (u * v);
    return { u, v, sine, cosine: (product / (l * l) + beta * beta) / (u * v), distance: distance / l };
  };
}

/** @param {number} square */
function root(square) {
  return square > 0 ? Math.sqrt(square) : 0;
}

/**
 * E[sigma(u) sigma(v)] of a pair, as a function of the pair and of its indices in the lists of deviations.
 * @param {Kind} kind @param {Float64Array} stdsX @param {Float64Array} stdsY
 * @returns {(pair: Pair, i: number, j: number) => number}
 */
function expectedProduct(kind, stdsX, stdsY) {
  if (kind === "relu") return arcCosine;
  if (kind === "erf") return arcSine;
  if (kind === "cosine") return ({ distance }) => Math.exp(-0.5 * distance * distance);
  const [seriesX, seriesY] = [hermiteSeries(stdsX), stdsY === stdsX ? null : hermiteSeries(stdsY)];
  return ({ cosine }, i, j) => mehler(seriesX, i, seriesY ?? seriesX, j, cosine);
}

/**
 * Rectified linear units: s_u s_v / 2 pi (sin t + (pi - t) cos t).
 * @param {Pair} pair
 */
function arcCosine({ u, v, sine, cosine }) {
  return (u * v * (sine + (Math.PI - Math.atan2(sine, cosine)) * cosine)) / (2 * Math.PI);
}

/**
 * Error-function units: 2 / pi arcsin(2 s_u s_v cos t / sqrt((1 + 2 s_u^2)(1 + 2 s_v^2))).
 * @param {Pair} pair
 */
function arcSine({ u, v, cosine }) {
  const ratio = (2 * u * v * cosine) / Math.sqrt((1 + 2 * u * u) * (1 + 2 * v * v));
  return (2 / Math.PI) * Math.asin(Math.max(-1, Math.min(1, ratio)));
}

/**
 * Coefficients of tanh(s z) in the odd normalised Hermite polynomials, `[s, term]`, and what they leave of E[tanh^2].
 * @typedef {{terms: Float64Array, rest: Float64Array}} Series
 */

/**
 * @param {Float64Array} stds
 * @returns {Series}
 */
function hermiteSeries(stds) {
  const { nodes, weights, polynomials } = hermiteRule();
  const terms = new Float64Array(stds.length * HERMITE_TERMS);
  const rest = new Float64Array(stds.length);
  stds.forEach((std, i) => {
    for (let n = 0; n < nodes.length; n += 1) {
      const value = Math.tanh(std * nodes[n]);
      rest[i] += weights[n] * value * value;
      for (let k = 0; k < HERMITE_TERMS; k += 1) terms[i * HERMITE_TERMS + k] += weights[n] * value * polynomials[n * HERMITE_TERMS + k];
    }
    for (let k = 0; k < HERMITE_TERMS; k += 1) rest[i] -= terms[i * HERMITE_TERMS + k] ** 2;
    rest[i] = root(rest[i]);
  });
  return { terms, rest };
}

/**
 * Mehler's series sum a_k(s_u) a_k(s_v) cos^k t by Horner's rule. What the series leaves out is put into one last
 * term, which makes the variances exact and keeps the matrix positive.
 * @param {Series} seriesX @param {number} i @param {Series} seriesY @param {number} j @param {number} cosine
 */
function mehler(seriesX, i, seriesY, j, cosine) {
  const square = cosine * cosine;
  let total = seriesX.rest[i] * seriesY.rest[j];
  for (let k = HERMITE_TERMS - 1; k >= 0; k -= 1) {
    total = total * square + seriesX.terms[i * HERMITE_TERMS + k] * seriesY.terms[j * HERMITE_TERMS + k];
  }
  return total * cosine;
}

/** @type {{nodes: Float64Array, weights: Float64Array, polynomials: Float64Array} | undefined} */
let rule;

/** The standard normal's trapezoidal rule on the half-line, doubled, and the odd Hermite polynomials at its nodes. */
function hermiteRule() {
  if (rule !== undefined) return rule;
  const nodes = Float64Array.from({ length: HERMITE_RADIUS / HERMITE_STEP }, (_, n) => (n + 0.5) * HERMITE_STEP);
  const weights = nodes.map((z) => (2 * HERMITE_STEP * Math.exp(-0.5 * z * z)) / Math.sqrt(2 * Math.PI));
  const polynomials = new Float64Array(nodes.length * HERMITE_TERMS);
  nodes.forEach((z, n) => {
    let [before, now] = [1, z];
    for (let k = 1; k < 2 * HERMITE_TERMS; k += 1) {
      if (k % 2 === 1) polynomials[n * HERMITE_TERMS + (k - 1) / 2] = now;
      [before, now] = [now, (z * now - Math.sqrt(k) * before) / Math.sqrt(k + 1)];
    }
  });
  rule = { nodes, weights, polynomials };
  return rule;
}
