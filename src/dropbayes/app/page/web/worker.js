/**
 * What runs beside the page: a dropout network that trains while it is asked, and the two agents in their worlds.
 *
 * A worker has one of the two tasks, chosen by its first message. It works in slices, between which it hears messages.
 */
import { Agent, SCHEDULES, tick } from "./agents.js";
import { createNetwork, drawFunctions, moments, siteMasks, standardPrediction } from "./network.js";
import { posterior } from "./process.js";
import { Training, weightDecays } from "./training.js";
import { World } from "./world.js";

/** @typedef {import("./state.js").Settings} Settings */
/** @typedef {import("./agents.js").Policy} Policy */

/**
 * @typedef {object} BandRequest
 * @property {"band"} task
 * @property {Settings} settings
 * @property {number[]} x
 * @property {number[]} y
 * @property {[number, number]} range of the grid
 * @property {boolean} running
 * @property {number} restarts a new value asks for new weights
 */

/**
 * @typedef {object} WorldRequest
 * @property {"world"} task
 * @property {"short" | "paper"} schedule
 * @property {number} seed
 * @property {boolean} running
 * @property {number} speed steps per second
 * @property {number} restarts
 */

export const N_GRID = 200;
export const SETTLED_AFTER = 4000; // steps without a change
const LEARNING_RATE = 0.01;
const RATE_HALVES = 800; // in steps: the rate falls with the root of 1 + step / this
const FIRST_STEPS = 3; // before the first band is shown
const SLICE = 12; // milliseconds of work between messages
const CURVE_BLOCK = 200; // steps whose mean reward is one point of the curves
const WORLD_FRAME = 33; // milliseconds between pictures of the worlds
/** @type {Policy[]} */
export const POLICIES = ["thompson", "epsilon-greedy"];

/**
 * Starts a task and answers messages with `post`.
 * @param {(message: any) => void} post
 * @returns {(request: BandRequest | WorldRequest) => void}
 */
export function taskRunner(post) {
  /** @type {Band | Worlds | null} */
  let task = null;
  return (request) => {
    task ??= request.task === "band" ? new Band(post) : new Worlds(post);
    task.receive(/** @type {any} */ (request));
  };
}

/** A network in training, and the process beside it. */
class Band {
  /** @param {(message: any) => void} post */
  constructor(post) {
    this.post = post;
    this.grid = new Float64Array(N_GRID);
    /** @type {BandRequest | null} */
    this.request = null;
    /** @type {Training | null} */
    this.training = null;
    /** @type {Uint8Array[]} */
    this.masks = [];
    this.age = 0; // steps since the last change
    this.isScheduled = false;
    this.processIsDue = false;
    this.processPrecision = 0;
  }

  /** @param {BandRequest} request */
  receive(request) {
    const before = this.request;
    this.request = request;
    const { settings, range } = request;
    const differs = (/** @type {(keyof Settings)[]} */ ...names) => !before || names.some((name) => before.settings[name] !== settings[name]);
    if (!before || before.range[0] !== range[0] || before.range[1] !== range[1]) {
      this.grid = Float64Array.from({ length: N_GRID }, (_, k) => range[0] + ((range[1] - range[0]) * k) / (N_GRID - 1));
    }
    const isNew = differs("width", "depth", "activation", "seed") || before?.restarts !== request.restarts;
    if (isNew || this.training === null) {
      this.training = new Training(createNetwork(settings), settings.seed, settings);
    }
    this.training.setObjective(settings);
    if (isNew || differs("nDraws", "dropProb")) {
      this.masks = siteMasks(this.training.network.widths, this.keys(), settings.dropProb);
    }
    const pointsDiffer = !before || String(before.x) !== String(request.x) || String(before.y) !== String(request.y);
    const trainingDiffers = isNew || pointsDiffer || differs("dropProb", "precision", "learnPrecision", "lengthScale");
    if (trainingDiffers) this.age = 0;
    this.processIsDue = true;
    if (isNew && request.x.length > 0) this.train(FIRST_STEPS, Infinity);
    this.predict();
    this.schedule();
  }

  keys() {
    const { settings } = /** @type {BandRequest} */ (this.request);
    return /** @type {const} */ ({ seed: settings.seed, nDraws: settings.nDraws, sampler: "stratified", replicate: 0 });
  }

  isTraining() {
    const request = /** @type {BandRequest} */ (this.request);
    return request.running && request.x.length > 0 && this.age < SETTLED_AFTER;
  }

  schedule() {
    if (this.isScheduled || !(this.isTraining() || this.processIsDue)) return;
    this.isScheduled = true;
    setTimeout(() => {
      this.isScheduled = false;
      this.work();
      this.schedule();
    });
  }

  /** A slice of training as long as a prediction takes, then the prediction. */
  work() {
    if (this.processIsDue) this.sendProcess();
    if (!this.isTraining()) return;
    this.train(Infinity, Math.max(SLICE, this.lastPrediction ?? 0));
    this.predict();
    const { settings } = /** @type {BandRequest} */ (this.request);
    const precision = this.training?.precision ?? 1;
    if (settings.learnPrecision && Math.abs(Math.log(precision / this.processPrecision)) > 0.1) this.processIsDue = true;
  }

  /** @param {number} steps at most @param {number} time in milliseconds */
  train(steps, time) {
    const { x, y } = /** @type {BandRequest} */ (this.request);
    const end = performance.now() + time;
    for (let step = 0; step < steps && this.age < SETTLED_AFTER && performance.now() < end; step += 1) {
      this.training?.advance(x, y, LEARNING_RATE / Math.sqrt(1 + this.age / RATE_HALVES));
      this.age += 1;
    }
  }

  predict() {
    const { settings, x, restarts } = /** @type {BandRequest} */ (this.request);
    const training = /** @type {Training} */ (this.training);
    const started = performance.now();
    const draws = drawFunctions(training.network, this.grid, this.masks, settings.dropProb, settings.nDraws);
    const { precision } = training;
    this.post({
      task: "band",
      grid: this.grid,
      draws,
      ...moments(draws, settings.nDraws),
      standard: standardPrediction(training.network, this.grid),
      network: training.network,
      precision,
      decays: weightDecays(training.network.widths, { ...settings, precision }, Math.max(1, x.length)),
      step: training.step,
      isTraining: this.isTraining(),
      settings,
      restarts,
    });
    this.lastPrediction = performance.now() - started;
  }

  sendProcess() {
    this.processIsDue = false;
    const { settings, x, y } = /** @type {BandRequest} */ (this.request);
    if (!settings.process) return;
    this.processPrecision = this.training?.precision ?? settings.precision;
    const kind = settings.covariance === "network" ? settings.activation : settings.covariance;
    const { depth, lengthScale } = settings;
    const covariance = { kind, depth: kind === "cosine" ? 1 : depth, lengthScale, biasScale: 1 / lengthScale };
    this.post({ task: "process", grid: this.grid, ...posterior(covariance, x, y, this.processPrecision, this.grid) });
  }
}

/** Two agents, each in a world of its own that starts the same. */
class Worlds {
  /** @param {(message: any) => void} post */
  constructor(post) {
    this.post = post;
    /** @type {WorldRequest | null} */
    this.request = null;
    /** @type {{world: World, agent: Agent, curve: number[], block: number}[]} */
    this.lives = [];
    this.step = 0;
    this.owed = 0; // steps not yet made
    this.last = 0;
    this.shown = 0;
    this.isScheduled = false;
  }

  /** @param {WorldRequest} request */
  receive(request) {
    const before = this.request;
    this.request = request;
    if (!before || before.restarts !== request.restarts || before.schedule !== request.schedule || before.seed !== request.seed) {
      this.lives = POLICIES.map((policy) => ({
        world: new World(request.seed),
        agent: new Agent(policy, SCHEDULES[request.schedule], request.seed),
        curve: [],
        block: 0,
      }));
      this.step = 0;
    }
    this.owed = 0;
    this.last = performance.now();
    this.show();
    this.schedule();
  }

  schedule() {
    if (this.isScheduled || !this.request?.running) return;
    this.isScheduled = true;
    setTimeout(() => {
      this.isScheduled = false;
      if (this.request?.running) this.work();
      this.schedule();
    }, 4);
  }

  /** The steps that are due by now, or as many as a slice allows. */
  work() {
    const { speed } = /** @type {WorldRequest} */ (this.request);
    const now = performance.now();
    this.owed = Math.min(this.owed + ((now - this.last) / 1000) * speed, speed);
    this.last = now;
    while (this.owed >= 1 && performance.now() - now < 2 * SLICE) {
      this.owed -= 1;
      this.advance();
    }
    if (performance.now() - this.shown > WORLD_FRAME) this.show();
  }

  advance() {
    this.step += 1;
    for (const life of this.lives) {
      life.block += tick(life.world, life.agent);
      if (this.step % CURVE_BLOCK === 0) {
        life.curve.push(life.block / CURVE_BLOCK);
        life.block = 0;
      }
    }
  }

  show() {
    this.shown = performance.now();
    this.post({
      task: "world",
      step: this.step,
      block: CURVE_BLOCK,
      lives: this.lives.map(({ world, agent, curve }) => ({
        x: world.x,
        y: world.y,
        angle: world.angle,
        items: world.items,
        view: world.view(),
        curve,
        isRandom: agent.age < agent.schedule.randomSteps,
      })),
    });
  }
}
