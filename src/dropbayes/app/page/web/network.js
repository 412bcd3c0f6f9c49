/**
 * The dropout network of the page: a perceptron of one input and one output, its draws and their statistics.
 *
 * A site stands before every weight layer but the first (a single input is not dropped), as in
 * nn.Sequential(Linear, ReLU, Dropout, Linear, ..., Dropout, Linear). Weights are kept in float32, so that what is
 * copied to Python is what is drawn here; arithmetic is in float64.
 */
import { sharedMasks, uniforms } from "./masks.js";

/** @typedef {import("./masks.js").Keys} Keys */
/** @typedef {"relu" | "tanh"} Activation */

/**
 * Widths from input to output; weights `[out, in]` and biases of every layer.
 * @typedef {{widths: number[], activation: Activation, weights: Float32Array[], biases: Float32Array[]}} Network
 */

const WEIGHT_SITE = 1000; // streams for the initial weights, apart from those of the masks
const REACH = 3; // kinks of the first layer start inside this range of inputs

/**
 * A network with random weights; the kinks of its first layer lie evenly over the inputs.
 * @param {{width: number, depth: number, activation: Activation, seed: number}} shape
 * @returns {Network}
 */
export function createNetwork({ width, depth, activation, seed }) {
  const widths = [1, ...Array(depth).fill(width), 1];
  const uniform = uniforms(seed, WEIGHT_SITE);
  const between = (/** @type {number} */ bound) => bound * (2 * uniform() - 1);
  const gain = activation === "relu" ? 6 : 3;
  const weights = [];
  const biases = [];
  for (let layer = 0; layer + 1 < widths.length; layer += 1) {
    const [nIn, nOut] = [widths[layer], widths[layer + 1]];
    const bound = Math.sqrt((layer === depth ? 3 : gain) / nIn);
    const weight = Float32Array.from({ length: nOut * nIn }, () => between(bound));
    weights.push(weight);
    biases.push(Float32Array.from({ length: nOut }, (_, unit) => (layer === 0 ? REACH * between(1) * weight[unit] : 0)));
  }
  return { widths, activation, weights, biases };
}

/**
 * The masks of all draws, for each site `[draw, unit]`.
 * @param {number[]} widths @param {Keys} keys @param {number} dropProb
 * @returns {Uint8Array[]}
 */
export function siteMasks(widths, keys, dropProb) {
  return widths.slice(1, -1).map((units, site) => sharedMasks(keys, site, units, dropProb));
}

/**
 * activation(x W^T + b), `[row, out]`; without an activation for the last layer.
 * @param {Float64Array} x `[row, in]` @param {number} rows @param {number} nIn
 * @param {Float32Array | Float64Array} weight `[out, in]` @param {Float32Array | Float64Array} bias
 * @param {number} nOut @param {Activation | null} activation @param {Float64Array} result
 */
export function layer(x, rows, nIn, weight, bias, nOut, activation, result) {
  // Blocks of two rows by four outputs: six loads for eight products, and no sum waits for the one before it.
  const evenRows = rows - (rows % 2);
  const blockedOutputs = nOut - (nOut % 4);
  for (let row = 0; row < evenRows; row += 2) {
    const first = row * nIn;
    for (let out = 0; out < blockedOutputs; out += 4) {
      const wa = out * nIn;
      let a0 = 0, a1 = 0, b0 = 0, b1 = 0, c0 = 0, c1 = 0, d0 = 0, d1 = 0;
      for (let i = 0; i < nIn; i += 1) {
        const x0 = x[first + i];
        const x1 = x[first + nIn + i];
        const at = wa + i;
        const a = weight[at];
        const b = weight[at + nIn];
        const c = weight[at + 2 * nIn];
        const d = weight[at + 3 * nIn];
        a0 += x0 * a;
        a1 += x1 * a;
        b0 += x0 * b;
        b1 += x1 * b;
        c0 += x0 * c;
        c1 += x1 * c;
        d0 += x0 * d;
        d1 += x1 * d;
      }
      const to = row * nOut + out;
      result[to] = bias[out] + a0;
      result[to + 1] = bias[out + 1] + b0;
      result[to + 2] = bias[out + 2] + c0;
      result[to + 3] = bias[out + 3] + d0;
      result[to + nOut] = bias[out] + a1;
      result[to + nOut + 1] = bias[out + 1] + b1;
      result[to + nOut + 2] = bias[out + 2] + c1;
      result[to + nOut + 3] = bias[out + 3] + d1;
    }
  }
  for (let row = 0; row < rows; row += 1) {
    for (let out = row < evenRows ? blockedOutputs : 0; out < nOut; out += 1) {
      let sum = bias[out];
      for (let i = 0; i < nIn; i += 1) sum += x[row * nIn + i] * weight[out * nIn + i];
      result[row * nOut + out] = sum;
    }
  }
  const end = rows * nOut;
  if (activation === "relu") for (let k = 0; k < end; k += 1) result[k] = result[k] > 0 ? result[k] : 0;
  if (activation === "tanh") for (let k = 0; k < end; k += 1) result[k] = Math.tanh(result[k]);
}

/**
 * Adds a product of matrices, result[a, i] += sum_k left[a, k] right[k, i]; the strides of `left` say how it is stored.
 * @param {Float64Array} result `[a, i]` @param {Float64Array} left @param {{a: number, k: number}} strides of `left`
 * @param {Float32Array | Float64Array} right `[k, i]` @param {number} nA @param {number} nK @param {number} nI
 */
export function addProduct(result, left, strides, right, nA, nK, nI) {
  const blocked = nK - (nK % 4);
  for (let a = 0; a < nA; a += 1) {
    const to = a * nI;
    for (let k = 0; k < nK; k += k < blocked ? 4 : 1) {
      const from = a * strides.a + k * strides.k;
      const at = k * nI;
      if (k >= blocked) {
        for (let i = 0; i < nI; i += 1) result[to + i] += left[from] * right[at + i];
        continue;
      }
      const l0 = left[from];
      const l1 = left[from + strides.k];
      const l2 = left[from + 2 * strides.k];
      const l3 = left[from + 3 * strides.k];
      if (l0 === 0 && l1 === 0 && l2 === 0 && l3 === 0) continue; // units that are off
      for (let i = 0; i < nI; i += 1) {
        const r = at + i;
        result[to + i] += l0 * right[r] + l1 * right[r + nI] + l2 * right[r + 2 * nI] + l3 * right[r + 3 * nI];
      }
    }
  }
}

/**
 * The units a mask keeps.
 * @param {Uint8Array} masks @param {number} draw @param {number} units
 */
function keptUnits(masks, draw, units) {
  const kept = [];
  for (let unit = 0; unit < units; unit += 1) if (masks[draw * units + unit]) kept.push(unit);
  return kept;
}

/**
 * The draws of the network at `x`, `[draw, row]`: the units a draw drops are left out of its products.
 * @param {Network} network @param {ArrayLike<number>} x @param {Uint8Array[]} masks of `siteMasks`
 * @param {number} dropProb @param {number} nDraws
 * @returns {Float64Array}
 */
export function drawFunctions(network, x, masks, dropProb, nDraws) {
  const { widths, activation, weights, biases } = network;
  const rows = x.length;
  const last = weights.length - 1;
  const result = new Float64Array(nDraws * rows);
  const widest = Math.max(...widths);
  const first = new Float64Array(rows * widths[1]);
  layer(Float64Array.from(x), rows, 1, weights[0], biases[0], widths[1], activation, first);
  let [input, output] = [new Float64Array(rows * widest), new Float64Array(rows * widest)];
  const weight = new Float64Array(widest * widest);
  const bias = new Float64Array(widest);
  const scale = 1 / (1 - dropProb);
  for (let draw = 0; draw < nDraws; draw += 1) {
    let inside = keptUnits(masks[0], draw, widths[1]);
    for (let row = 0; row < rows; row += 1) {
      for (let k = 0; k < inside.length; k += 1) input[row * inside.length + k] = first[row * widths[1] + inside[k]];
    }
    for (let at = 1; at <= last; at += 1) {
      const outside = at === last ? [0] : keptUnits(masks[at], draw, widths[at + 1]);
      const [nIn, nOut] = [inside.length, outside.length];
      for (let o = 0; o < nOut; o += 1) {
        const from = outside[o] * widths[at];
        for (let i = 0; i < nIn; i += 1) weight[o * nIn + i] = scale * weights[at][from + inside[i]];
        bias[o] = biases[at][outside[o]];
      }
      layer(input, rows, nIn, weight, bias, nOut, at === last ? null : activation, output);
      [input, output] = [output, input];
      inside = outside;
    }
    result.set(input.subarray(0, rows), draw * rows);
  }
  return result;
}

/**
 * The standard dropout prediction at `x`: one pass with every unit kept, the weights averaged.
 * @param {Network} network @param {ArrayLike<number>} x
 * @returns {Float64Array}
 */
export function standardPrediction(network, x) {
  const { widths, activation, weights, biases } = network;
  let values = Float64Array.from(x);
  weights.forEach((weight, at) => {
    const result = new Float64Array(x.length * widths[at + 1]);
    layer(values, x.length, widths[at], weight, biases[at], widths[at + 1], at + 1 < weights.length ? activation : null, result);
    values = result;
  });
  return values;
}

/**
 * The mean over draws and the epistemic variance (over T, not T - 1), each `[row]`.
 * @param {Float64Array} draws `[draw, row]` @param {number} nDraws
 */
export function moments(draws, nDraws) {
  const rows = draws.length / nDraws;
  const mean = new Float64Array(rows);
  const epistemic = new Float64Array(rows);
  for (let k = 0; k < draws.length; k += 1) mean[k % rows] += draws[k] / nDraws;
  for (let k = 0; k < draws.length; k += 1) epistemic[k % rows] += (draws[k] - mean[k % rows]) ** 2 / nDraws;
  return { mean, epistemic };
}
