/**
 * Training: Adam on the negative evidence lower bound per row, `dropbayes.negative_elbo` written out.
 *
 *   tau / 2M sum (y - f)^2 - log(tau) / 2 + 1/2N sum c |theta|^2,   c = p l^2 (weights), l^2 (biases)
 *
 * [GG16, eq:L:GP-MC, eq:L:GP-MC-reg-lengthscale], with the paper's l^2 = K for the layers after the first. Every row
 * of every step has its own masks: words of the independent sampler, whose draw is the step.
 */
import { fillRowMasks, uniforms } from "./masks.js";
import { addProduct, layer } from "./network.js";

/** @typedef {import("./network.js").Network} Network */

/**
 * @typedef {object} Objective
 * @property {number} dropProb
 * @property {number} precision tau; where the search starts if it is learned
 * @property {boolean} learnPrecision
 * @property {number} lengthScale l of the first layer and of all biases
 */

/** @typedef {{first: Float64Array, second: Float64Array}} Moments */

const BATCH = 64;
const FIRST_DECAY = 0.9;
const SECOND_DECAY = 0.999;
const EPSILON = 1e-8;
const BATCH_SITE = 2000;
const LOWEST_LOG_PRECISION = Math.log(0.1);
const HIGHEST_LOG_PRECISION = Math.log(10000);

/**
 * The weight decay that the paper's identity gives each layer, lambda = p l^2 / (2 N tau).
 * [GG16, eq:weightdecay_tau_relation].
 * @param {number[]} widths @param {Objective} objective @param {number} nData
 * @returns {number[]}
 */
export function weightDecays(widths, objective, nData) {
  return widths.slice(0, -1).map((nIn, at) => coefficient(at, nIn, objective) / (2 * nData * objective.precision));
}

/**
 * c = p l^2 of one layer's weights: the first is not dropped, the others have l^2 = K.
 * @param {number} at @param {number} nIn @param {Objective} objective
 */
function coefficient(at, nIn, objective) {
  return at === 0 ? objective.lengthScale ** 2 : (1 - objective.dropProb) * nIn;
}

/** A network in training, with the optimiser's memory. */
export class Training {
  /**
   * @param {Network} network changed in place @param {number} seed of masks and batches
   * @param {Objective} objective
   */
  constructor(network, seed, objective) {
    this.network = network;
    this.objective = objective;
    this.keys = /** @type {const} */ ({ seed, nDraws: 1, sampler: "independent", replicate: 1 });
    this.chance = uniforms(seed, BATCH_SITE);
    this.step = 0;
    this.logPrecision = Float32Array.of(Math.log(objective.precision));
    const moments = (/** @type {ArrayLike<number>} */ z) => ({ first: new Float64Array(z.length), second: new Float64Array(z.length) });
    this.weightMoments = network.weights.map(moments);
    this.biasMoments = network.biases.map(moments);
    this.precisionMoments = moments(this.logPrecision);
  }

  /** The precision now: learned or as set. */
  get precision() {
    return this.objective.learnPrecision ? Math.exp(this.logPrecision[0]) : this.objective.precision;
  }

  /**
   * The objective from now on; a precision that is set is also where learning would start.
   * @param {Objective} objective
   */
  setObjective(objective) {
    this.objective = objective;
    if (!objective.learnPrecision) this.logPrecision[0] = Math.log(objective.precision);
  }

  /**
   * One step on all points, or on a random batch of them if there are many.
   * @param {ArrayLike<number>} x @param {ArrayLike<number>} y @param {number} learningRate
   */
  advance(x, y, learningRate) {
    const nData = x.length;
    const rows = Math.min(nData, BATCH);
    const pick = nData <= BATCH ? null : Array.from({ length: rows }, () => Math.floor(this.chance() * nData));
    const inputs = Float64Array.from({ length: rows }, (_, k) => x[pick ? pick[k] : k]);
    const targets = Float64Array.from({ length: rows }, (_, k) => y[pick ? pick[k] : k]);
    const { weights, biases } = this.network;
    const { activations, masks } = this.forward(inputs);
    const output = activations[activations.length - 1];
    const { precision } = this;
    let squares = 0;
    let upstream = new Float64Array(rows);
    for (let row = 0; row < rows; row += 1) {
      const error = output[row] - targets[row];
      squares += error * error;
      upstream[row] = (precision * error) / rows;
    }
    this.step += 1;
    for (let at = weights.length - 1; at >= 0; at -= 1) {
      const input = activations[at];
      const { weight, bias } = this.gradients(at, input, upstream, rows, nData);
      if (at > 0) upstream = this.below(at, input, upstream, masks[at - 1], rows);
      this.descend(weights[at], weight, this.weightMoments[at], learningRate);
      this.descend(biases[at], bias, this.biasMoments[at], learningRate);
    }
    if (this.objective.learnPrecision) {
      const gradient = Float64Array.of((precision * squares) / (2 * rows) - 0.5);
      this.descend(this.logPrecision, gradient, this.precisionMoments, learningRate);
      this.logPrecision[0] = Math.min(HIGHEST_LOG_PRECISION, Math.max(LOWEST_LOG_PRECISION, this.logPrecision[0]));
    }
  }

  /**
   * The input of every layer after its mask, the output last; and the masks, scaled.
   * @param {Float64Array} inputs
   */
  forward(inputs) {
    const { widths, weights, biases, activation } = this.network;
    const rows = inputs.length;
    const activations = [inputs];
    const masks = [];
    for (let at = 0; at < weights.length; at += 1) {
      const isLast = at + 1 === weights.length;
      const result = new Float64Array(rows * widths[at + 1]);
      layer(activations[at], rows, widths[at], weights[at], biases[at], widths[at + 1], isLast ? null : activation, result);
      if (!isLast) {
        const mask = new Float32Array(result.length);
        fillRowMasks(this.keys, at, this.step, this.objective.dropProb, rows, widths[at + 1], mask);
        for (let k = 0; k < result.length; k += 1) result[k] *= mask[k];
        masks.push(mask);
      }
      activations.push(result);
    }
    return { activations, masks };
  }

  /**
   * The gradients of one layer, with those of the prior.
   * @param {number} at @param {Float64Array} input @param {Float64Array} upstream @param {number} rows
   * @param {number} nData
   */
  gradients(at, input, upstream, rows, nData) {
    const { widths, weights, biases } = this.network;
    const [nIn, nOut] = [widths[at], widths[at + 1]];
    const keepProb = at === 0 ? 1 : 1 - this.objective.dropProb;
    const decay = coefficient(at, nIn, this.objective) / (keepProb ** 2 * nData); // of M, which is stored times p
    const biasDecay = this.objective.lengthScale ** 2 / nData;
    const weight = Float64Array.from(weights[at], (value) => decay * value);
    const bias = Float64Array.from(biases[at], (value) => biasDecay * value);
    for (let k = 0; k < upstream.length; k += 1) bias[k % nOut] += upstream[k];
    addProduct(weight, upstream, { a: 1, k: nOut }, input, nOut, rows, nIn);
    return { weight, bias };
  }

  /**
   * The gradient in the layer below, before its activation. Where a unit was dropped, mask and gradient are 0.
   * @param {number} at @param {Float64Array} input @param {Float64Array} upstream @param {Float32Array} mask
   * @param {number} rows
   */
  below(at, input, upstream, mask, rows) {
    const { widths, weights, activation } = this.network;
    const [nIn, nOut] = [widths[at], widths[at + 1]];
    const result = new Float64Array(rows * nIn);
    addProduct(result, upstream, { a: nOut, k: 1 }, weights[at], rows, nOut, nIn);
    for (let k = 0; k < result.length; k += 1) {
      if (mask[k] === 0) result[k] = 0;
      else if (activation === "tanh") result[k] *= mask[k] * (1 - (input[k] / mask[k]) ** 2);
      else result[k] *= input[k] > 0 ? mask[k] : 0;
    }
    return result;
  }

  /**
   * Adam (Kingma and Ba 2015), as torch.optim.Adam has it.
   * @param {Float32Array} values @param {Float64Array} gradient @param {Moments} moments @param {number} learningRate
   */
  descend(values, gradient, { first, second }, learningRate) {
    const correction = Math.sqrt(1 - SECOND_DECAY ** this.step);
    const rate = learningRate / (1 - FIRST_DECAY ** this.step);
    for (let k = 0; k < values.length; k += 1) {
      first[k] = FIRST_DECAY * first[k] + (1 - FIRST_DECAY) * gradient[k];
      second[k] = SECOND_DECAY * second[k] + (1 - SECOND_DECAY) * gradient[k] ** 2;
      values[k] -= (rate * first[k]) / (Math.sqrt(second[k]) / correction + EPSILON);
    }
  }
}
