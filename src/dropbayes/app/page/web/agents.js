/**
 * Agents that learn action values by replay: Thompson sampling through dropout, and epsilon-greedy.
 *
 * `experiments.reinforcement`, one agent at a time: two hidden layers of 50, plain gradient descent, a target
 * that is a draw of its own [GG16, section "Reinforcement Learning"].
 */
import { fillRowMasks, uniforms } from "./masks.js";
import { addProduct, layer } from "./network.js";
import { ACTIONS, N_INPUTS, viewInputs } from "./world.js";

/** @typedef {import("./world.js").World} World */
/** @typedef {"thompson" | "epsilon-greedy"} Policy */

/**
 * @typedef {object} Schedule
 * @property {number} randomSteps first steps, taken at random
 * @property {number} learningStarts stored experiences after which learning starts
 * @property {number} learningRate of plain gradient descent
 * @property {number} replay experiences kept; when full, a random one is replaced
 * @property {number} epsilonBurnIn the step from which epsilon falls
 * @property {number} epsilonTotal the step at which epsilon would reach 0; it stops at its least
 */

/** @type {Record<"short" | "paper", Schedule>} */
export const SCHEDULES = {
  paper: { randomSteps: 5000, learningStarts: 1000, learningRate: 0.001, replay: 30000, epsilonBurnIn: 3000, epsilonTotal: 200000 },
  short: { randomSteps: 400, learningStarts: 200, learningRate: 0.01, replay: 2000, epsilonBurnIn: 400, epsilonTotal: 16000 },
};

const WIDTHS = [N_INPUTS, 50, 50, ACTIONS.length];
const DROP_PROB = 0.1;
const DISCOUNT = 0.7;
const WEIGHT_DECAY = 0.001;
const BATCH = 64;
const LEAST_EPSILON = 0.05;
const FIELDS = 2 * N_INPUTS + 2; // state, next state, action, reward

/**
 * The chance of a random action at an age.
 * @param {number} age @param {Schedule} schedule
 */
export function epsilon(age, { epsilonBurnIn, epsilonTotal }) {
  return Math.min(1, Math.max(LEAST_EPSILON, 1 - (age - epsilonBurnIn) / (epsilonTotal - epsilonBurnIn)));
}

/** One agent with its network and its memory. */
export class Agent {
  /** @param {Policy} policy @param {Schedule} schedule @param {number} seed of weights, masks, replay and actions */
  constructor(policy, schedule, seed) {
    this.policy = policy;
    this.schedule = schedule;
    this.chance = uniforms(seed, 1);
    this.keys = /** @type {const} */ ({ seed, nDraws: 1, sampler: "independent", replicate: 2 });
    this.age = 0;
    this.stored = 0;
    this.passes = 0;
    this.memory = new Float32Array(schedule.replay * FIELDS);
    /** @type {{state: Float64Array, action: number, reward: number} | null} */
    this.last = null;
    this.weights = WIDTHS.slice(1).map((nOut, at) => Float64Array.from({ length: nOut * WIDTHS[at] }, () => this.normal() / Math.sqrt(WIDTHS[at])));
    this.biases = WIDTHS.slice(1).map((nOut, at) => new Float64Array(nOut).fill(at < 2 ? 0.1 : 0));
  }

  normal() {
    return Math.sqrt(-2 * Math.log(this.chance())) * Math.cos(2 * Math.PI * this.chance());
  }

  /**
   * Fresh masks before every weight layer; none for a network that does not drop.
   * @param {number} rows
   * @returns {Float32Array[] | null}
   */
  masks(rows) {
    if (this.policy !== "thompson") return null;
    this.passes += 1;
    return WIDTHS.slice(0, 3).map((units, site) => {
      const mask = new Float32Array(rows * units);
      fillRowMasks(this.keys, site, this.passes, DROP_PROB, rows, units, mask);
      return mask;
    });
  }

  /**
   * The action values `[row, action]` last, after the input of every weight layer.
   * @param {Float64Array} states `[row, input]` @param {number} rows @param {Float32Array[] | null} masks
   */
  values(states, rows, masks) {
    const passed = [states];
    for (let at = 0; at < 3; at += 1) {
      const mask = masks?.[at];
      if (mask) passed[at] = passed[at].map((value, k) => value * mask[k]);
      const result = new Float64Array(rows * WIDTHS[at + 1]);
      layer(passed[at], rows, WIDTHS[at], this.weights[at], this.biases[at], WIDTHS[at + 1], at < 2 ? "relu" : null, result);
      passed.push(result);
    }
    return passed;
  }

  /**
   * The action for a state: random, or the best by one draw of the network.
   * @param {Float64Array} state
   */
  choose(state) {
    const atRandom = Math.floor(this.chance() * ACTIONS.length);
    if (this.age < this.schedule.randomSteps) return atRandom;
    const values = this.values(state, 1, this.masks(1))[3];
    const best = values.indexOf(Math.max(...values));
    if (this.policy === "thompson") return best;
    return this.chance() < epsilon(this.age, this.schedule) ? atRandom : best;
  }

  /**
   * Stores the experience that `state` completes, and keeps the new half of the next one.
   * @param {Float64Array} state @param {number} action @param {number} reward
   */
  remember(state, action, reward) {
    if (this.last) {
      const isFull = this.stored === this.schedule.replay;
      const place = isFull ? Math.floor(this.chance() * this.stored) : this.stored;
      if (!isFull) this.stored += 1;
      this.memory.set([...this.last.state, ...state, this.last.action, this.last.reward], place * FIELDS);
    }
    this.last = { state, action, reward };
    this.age += 1;
  }

  /** One descent step on a random batch, if enough is stored. */
  learn() {
    if (this.stored <= this.schedule.learningStarts) return;
    const batch = Array.from({ length: BATCH }, () => Math.floor(this.chance() * this.stored) * FIELDS);
    const column = (/** @type {number} */ from, /** @type {number} */ width) =>
      Float64Array.from({ length: BATCH * width }, (_, k) => this.memory[batch[Math.floor(k / width)] + from + (k % width)]);
    const [states, after] = [column(0, N_INPUTS), column(N_INPUTS, N_INPUTS)];
    this.learnFrom(states, after, column(2 * N_INPUTS, 1), column(2 * N_INPUTS + 1, 1), this.masks(BATCH), this.masks(BATCH));
  }

  /**
   * One descent step on 1/2M sum (Q(s, a) - r - discount max Q(s', a'))^2.
   * @param {Float64Array} states @param {Float64Array} after @param {Float64Array} actions @param {Float64Array} rewards
   * @param {Float32Array[] | null} futureMasks @param {Float32Array[] | null} masks
   */
  learnFrom(states, after, actions, rewards, futureMasks, masks) {
    const rows = actions.length;
    const nActions = ACTIONS.length;
    const future = this.values(after, rows, futureMasks)[3];
    const passed = this.values(states, rows, masks);
    const upstream = new Float64Array(rows * nActions);
    for (let row = 0; row < rows; row += 1) {
      const best = Math.max(...future.subarray(row * nActions, (row + 1) * nActions));
      const chosen = row * nActions + actions[row];
      upstream[chosen] = passed[3][chosen] - rewards[row] - DISCOUNT * best;
    }
    this.descend(upstream, passed, rows, masks ? 1 / (1 - DROP_PROB) : 1);
  }

  /**
   * Back-propagation and descent. Where a unit is dropped or inactive its input is 0; elsewhere the mask is `scale`.
   * @param {Float64Array} upstream @param {Float64Array[]} passed @param {number} rows @param {number} scale
   */
  descend(upstream, passed, rows, scale) {
    const rate = this.schedule.learningRate / rows;
    const shrink = 1 - rate * WEIGHT_DECAY;
    for (let at = 2; at >= 0; at -= 1) {
      const [nIn, nOut, weight, bias, input] = [WIDTHS[at], WIDTHS[at + 1], this.weights[at], this.biases[at], passed[at]];
      const below = new Float64Array(rows * nIn);
      const step = new Float64Array(weight.length);
      for (let k = 0; k < upstream.length; k += 1) bias[k % nOut] -= rate * upstream[k];
      addProduct(below, upstream, { a: nOut, k: 1 }, weight, rows, nOut, nIn);
      addProduct(step, upstream, { a: 1, k: nOut }, input, nOut, rows, nIn);
      for (let k = 0; k < weight.length; k += 1) weight[k] = shrink * weight[k] - rate * step[k];
      for (let k = 0; k < below.length; k += 1) below[k] = input[k] > 0 ? scale * below[k] : 0;
      upstream = below;
    }
  }
}

/**
 * One step: see, choose, move and eat, learn; returns the reward.
 * @param {World} world @param {Agent} agent
 */
export function tick(world, agent) {
  const view = world.view();
  const state = viewInputs(view);
  const action = agent.choose(state);
  const reward = world.act(action, view);
  agent.remember(state, action, reward);
  agent.learn();
  return reward;
}
