// Short runs of the page's classes, for comparison with the library.
import { createNetwork } from "../../src/dropbayes/page/web/network.js";
import { Training } from "../../src/dropbayes/page/web/training.js";

/** The network before and after `steps` steps of training, and the precision learned. */
export function trained(shape, seed, objective, x, y, learningRate, steps) {
  const network = createNetwork(shape);
  const before = structuredClone(network);
  const training = new Training(network, seed, objective);
  for (let step = 0; step < steps; step += 1) training.advance(x, y, learningRate);
  return { before: lists(before), after: lists(network), precision: training.precision };
}

function lists({ widths, activation, weights, biases }) {
  return { widths, activation, weights: weights.map((w) => Array.from(w)), biases: biases.map((b) => Array.from(b)) };
}
