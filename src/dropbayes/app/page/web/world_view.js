/** The view of the world: two agents side by side and their reward curves. */
import { byId } from "./document.js";
import { linearScale, plainNumber, shortNumber, Surface } from "./plot.js";
import { AGENT_RADIUS, HEIGHT, ITEM_RADIUS, N_EYES, WALLS, WIDTH } from "./world.js";

/** Steps per second for each position of the slider; the last asks for more than any machine gives. */
const SPEEDS = [5, 15, 30, 60, 120, 250, 500, 1000, 100000];
const AVERAGED = 5; // blocks of the running mean: the last 1,000 steps, as in the paper's demonstration
const EYE_COLOURS = ["faint", "food", "poison"];
const NAMES = ["thompson", "epsilon"];

/**
 * @typedef {object} Life
 * @property {number} x
 * @property {number} y
 * @property {number} angle
 * @property {import("./world.js").Item[]} items
 * @property {import("./world.js").View} view
 * @property {number[]} curve mean rewards of blocks of steps
 * @property {boolean} isRandom
 */

/** @typedef {{step: number, block: number, lives: Life[]}} Picture */

/**
 * The mean of the last blocks (fewer at the start).
 * @param {number[]} curve
 */
export function runningMean(curve) {
  return curve.map((_, k) => {
    const window = curve.slice(Math.max(0, k - AVERAGED + 1), k + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

/** The tab of the world. Nothing moves until it is told to run. */
export class WorldView {
  /** @param {() => Worker} startWorker */
  constructor(startWorker) {
    this.worker = startWorker();
    this.worker.addEventListener("message", ({ data }) => this.show(data));
    this.worlds = NAMES.map((name) => new Surface(byId(`world-${name}`)));
    this.rewards = new Surface(byId("rewards"));
    /** @type {Picture | null} */
    this.picture = null;
    this.isRunning = false;
    this.isVisible = true;
    this.restarts = 0;
    this.frame = 0;
    this.bind();
    this.send();
  }

  bind() {
    byId("world-run").addEventListener("click", () => {
      this.isRunning = !this.isRunning;
      this.send();
    });
    byId("world-restart").addEventListener("click", () => {
      this.restarts += 1;
      this.send();
    });
    for (const id of ["speed", "schedule", "world-seed"]) byId(id).addEventListener("input", () => this.send());
    byId("eyes").addEventListener("change", () => this.redraw());
    const observer = new ResizeObserver(() => this.redraw());
    for (const surface of [...this.worlds, this.rewards]) observer.observe(surface.canvas);
  }

  send() {
    const value = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (byId(id)).value;
    const speed = SPEEDS[Number(value("speed"))];
    byId("world-run").textContent = this.isRunning ? "Pause" : "Run";
    const text = speed > 1000 ? "full" : `${speed}/s`;
    byId("speed-value").textContent = text;
    byId("speed").setAttribute("aria-valuetext", speed > 1000 ? "as fast as it goes" : `${speed} steps per second`);
    this.worker.postMessage({
      task: "world",
      schedule: value("schedule"),
      seed: Math.min(2 ** 31 - 1, Math.max(0, Math.round(Number(value("world-seed")) || 0))),
      running: this.isRunning && this.isVisible,
      speed,
      restarts: this.restarts,
    });
  }

  /** @param {boolean} isVisible */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.send();
    this.redraw();
  }

  /** @param {Picture} picture */
  show(picture) {
    this.picture = picture;
    this.redraw();
  }

  redraw() {
    if (!this.frame && this.isVisible) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    if (!this.picture) return;
    const { lives, step } = this.picture;
    lives.forEach((life, k) => {
      this.drawWorld(this.worlds[k], life, `c${k}`);
      const mean = runningMean(life.curve).at(-1);
      byId(`reward-${NAMES[k]}`).textContent = life.isRandom ? "at random still" : mean === undefined ? "" : `reward ${shortNumber(mean)}`;
    });
    this.drawRewards(this.picture);
    byId("world-status").textContent = `Step ${step.toLocaleString("en")}. Rewards: 5 for food, −6 for poison, up to 1 for an open view, 0.1 for going forward.`;
  }

  /** @param {Surface} surface @param {Life} life @param {string} colour */
  drawWorld(surface, life, colour) {
    const context = surface.begin();
    const scale = surface.width / WIDTH;
    context.scale(scale, scale);
    context.lineWidth = Math.max(3, 1.5 / scale);
    context.lineCap = "round";
    context.strokeStyle = surface.colour("ink");
    context.beginPath();
    for (const [x, y, toX, toY] of WALLS) {
      context.moveTo(x, y);
      context.lineTo(toX, toY);
    }
    context.stroke();
    if (/** @type {HTMLInputElement} */ (byId("eyes")).checked) this.drawEyes(surface, life);
    for (const item of life.items) if (item.present) this.drawItem(surface, item);
    context.fillStyle = surface.colour(colour);
    context.beginPath();
    context.arc(life.x, Math.min(life.y, HEIGHT), AGENT_RADIUS, 0, 2 * Math.PI);
    context.fill();
    context.strokeStyle = surface.colour("paper");
    context.lineWidth = 3;
    context.beginPath();
    context.moveTo(life.x, life.y);
    context.lineTo(life.x + AGENT_RADIUS * Math.sin(life.angle), life.y + AGENT_RADIUS * Math.cos(life.angle));
    context.stroke();
  }

  /**
   * Food is a disc, poison a cross: the two differ in more than colour.
   * @param {Surface} surface @param {import("./world.js").Item} item
   */
  drawItem(surface, item) {
    const { context } = surface;
    context.lineWidth = 4;
    if (item.poison) {
      const arm = 0.7 * ITEM_RADIUS;
      context.strokeStyle = surface.colour("poison");
      context.beginPath();
      context.moveTo(item.x - arm, item.y - arm);
      context.lineTo(item.x + arm, item.y + arm);
      context.moveTo(item.x - arm, item.y + arm);
      context.lineTo(item.x + arm, item.y - arm);
      context.stroke();
    } else {
      context.fillStyle = surface.colour("food");
      context.beginPath();
      context.arc(item.x, item.y, ITEM_RADIUS, 0, 2 * Math.PI);
      context.fill();
    }
  }

  /** @param {Surface} surface @param {Life} life */
  drawEyes(surface, { x, y, angle, view }) {
    const { context } = surface;
    context.lineWidth = 1.5;
    for (let eye = 0; eye < N_EYES; eye += 1) {
      const direction = angle + (eye - 3) * 0.25;
      const kind = view.kind[eye];
      context.strokeStyle = surface.colour(kind < 0 ? "edge" : EYE_COLOURS[kind]);
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + view.distance[eye] * Math.sin(direction), y + view.distance[eye] * Math.cos(direction));
      context.stroke();
    }
  }

  /** @param {Picture} picture */
  drawRewards({ lives, block }) {
    const { rewards } = this;
    rewards.begin();
    const curves = lives.map((life) => runningMean(life.curve));
    const blocks = Math.max(10, curves[0].length);
    const values = curves.flat();
    const low = Math.min(0.4, ...values);
    const high = Math.max(1.4, ...values);
    const x = linearScale([0, blocks * block], 44, rewards.width - 10);
    const y = linearScale([low - 0.1, high + 0.1], rewards.height - 26, 8);
    rewards.axes(x, y, { x: (v) => v.toLocaleString("en"), y: plainNumber });
    rewards.axisLabels(x, y, { x: "steps", y: "mean reward of 1,000 steps" });
    curves.forEach((curve, k) => {
      const steps = curve.map((_, at) => (at + 1) * block);
      if (curve.length > 0) rewards.curve(x, y, [0, ...steps], [curve[0], ...curve], { colour: `c${k}`, width: 2.5, dash: k === 1 ? [7, 4] : [] });
    });
  }
}
