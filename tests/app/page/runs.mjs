// Short runs of the page's classes, for comparison with the library.
import { readFileSync } from "node:fs";

import { sharedMasks } from "../../../src/dropbayes/app/page/web/masks.js";
import { createNetwork } from "../../../src/dropbayes/app/page/web/network.js";
import { Training } from "../../../src/dropbayes/app/page/web/training.js";
import { SCENES } from "../../../src/dropbayes/app/page/web/scenes.js";
import { stateOfFragment, DEFAULTS, stateFragment } from "../../../src/dropbayes/app/page/web/state.js";
import { Agent, SCHEDULES, tick } from "../../../src/dropbayes/app/page/web/agents.js";
import { centredStrokes, DIGITS, drawLogits, DROP_PROB, hiddenUnits, ink, readTensors, restoredLayers, rotatedImage } from "../../../src/dropbayes/app/page/web/digit.js";
import { viewInputs, World } from "../../../src/dropbayes/app/page/web/world.js";

/** The network before and after `steps` steps of training, and the precision learned. */
export function trainNetwork(shape, seed, objective, x, y, learningRate, steps) {
  const network = createNetwork(shape);
  const before = structuredClone(network);
  const training = new Training(network, seed, objective);
  for (let step = 0; step < steps; step += 1) training.advance(x, y, learningRate);
  return { before: lists(before), after: lists(network), precision: training.precision };
}

function lists({ widths, activation, weights, biases }) {
  return { widths, activation, weights: weights.map((w) => Array.from(w)), biases: biases.map((b) => Array.from(b)) };
}

/** Inputs, rewards and places of an agent that takes `actions` in a world set to `state`. */
export function walk(state, actions) {
  const world = Object.assign(new World(0), state);
  return actions.map((action) => {
    const view = world.view();
    const inputs = Array.from(viewInputs(view));
    const reward = world.act(action, view);
    return { inputs, reward, x: world.x, y: world.y, angle: world.angle };
  });
}

/** The weights after learning once from the same experiences with the same masks. */
export function learnOnce(weights, biases, learningRate, states, after, actions, rewards, futureMasks, masks) {
  const agent = new Agent("thompson", { ...SCHEDULES.paper, learningRate }, 0);
  agent.weights = weights;
  agent.biases = biases;
  agent.learnFrom(states, after, actions, rewards, futureMasks, masks);
  return { weights: agent.weights.map((w) => Array.from(w)), biases: agent.biases.map((b) => Array.from(b)) };
}

/** Mean rewards of `steps` steps, block by block. */
export function rewardsOfLife(policy, schedule, seed, steps, block) {
  const world = new World(seed);
  const agent = new Agent(policy, SCHEDULES[schedule], seed);
  const means = [];
  for (let k = 0; k < steps / block; k += 1) {
    let total = 0;
    for (let step = 0; step < block; step += 1) total += tick(world, agent);
    means.push(total / block);
  }
  return means;
}

/** A written digit, turned. */
export function writtenDigit(kind, degrees) {
  return rotatedImage(ink(centredStrokes(DIGITS[kind])), degrees);
}

/** The softmax inputs of the draws of the network in a file. */
export function digitDraws(path, image, keys) {
  const network = restoredLayers(readTensors(new Uint8Array(readFileSync(path))));
  const masks = sharedMasks(keys, 0, network.hidden.bias.length, DROP_PROB);
  return drawLogits(network, hiddenUnits(network, image), masks);
}

export function allScenes() {
  return SCENES;
}

/** The address of a scene as it comes. */
export function sceneAddress(scene) {
  const settings = { ...DEFAULTS, ...SCENES[scene].settings };
  return stateFragment({ tab: "points", scene, points: null, settings }, settings);
}

/** A state read back from its address, with the settings that were given. */
export function readBack(state) {
  const usual = (name) => (name in SCENES ? { ...DEFAULTS, ...SCENES[name].settings } : null);
  const whole = { ...state, settings: { ...usual(state.scene), ...state.settings } };
  const again = stateOfFragment(stateFragment(whole, usual(state.scene)), usual, "gap");
  const names = Object.keys(state.settings);
  return { ...again, settings: Object.fromEntries(names.map((name) => [name, again.settings[name]])) };
}
