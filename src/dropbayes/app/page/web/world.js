/**
 * The paper's reinforcement learning world: walls, food, poison and nine eyes.
 *
 * One world of `experiments.foraging`, number for number. Angles turn clockwise from the y axis.
 */
import { uniforms } from "./masks.js";

export const WIDTH = 700;
export const HEIGHT = 500;
export const ITEM_RADIUS = 10;
export const AGENT_RADIUS = 10;
export const SIGHT = 85;
export const N_EYES = 9;
export const N_INPUTS = 3 * N_EYES;
const N_ITEMS = 30;
const MARGIN = 20;
const FOOD_REWARD = 5;
const POISON_REWARD = -6;
const OLD_AGE = 5000;
const REMOVAL_EVERY = 100;
const REMOVAL_CHANCE = 0.1;
const ARRIVAL_EVERY = 10;
const ARRIVAL_CHANCE = 0.25;
const WALL = 0;
const FOOD = 1;
const POISON = 2;
const NOTHING = -1;

/** The turns of the two wheels, in radians. */
export const ACTIONS = [[1, 1], [0.8, 1], [1, 0.8], [0.5, 0], [0, 0.5]];
const FORWARD = 0;
const FORWARD_BONUS = 0.1;
const CLEAR_VIEW = 0.75;
const OPENNESS_FACTOR = 2;

/**
 * The sides of a box as segments [x, y, x, y], the left one last.
 * @param {number} x @param {number} y @param {number} width @param {number} height
 */
function box(x, y, width, height) {
  const [right, bottom] = [x + width, y + height];
  return [[x, y, right, y], [right, y, right, bottom], [right, bottom, x, bottom], [x, bottom, x, y]];
}

/** The outer box and two rooms open to the left. */
export const WALLS = [
  ...box(10, 10, WIDTH - 20, HEIGHT - 20),
  ...box(100, 100, 200, 300).slice(0, 3),
  ...box(400, 100, 200, 300).slice(0, 3),
];

/**
 * How far along a way (0 to 1) the first wall is met; infinite if none is.
 * @param {number} x @param {number} y @param {number} toX @param {number} toY
 */
export function crossing(x, y, toX, toY) {
  let nearest = Infinity;
  const [alongX, alongY] = [toX - x, toY - y];
  for (const [wx, wy, endX, endY] of WALLS) {
    const [wallX, wallY, fromX, fromY] = [endX - wx, endY - wy, x - wx, y - wy];
    const area = wallY * alongX - wallX * alongY;
    const share = (wallX * fromY - wallY * fromX) / area;
    const place = (alongX * fromY - alongY * fromX) / area;
    if (share > 0 && share < 1 && place > 0 && place < 1) nearest = Math.min(nearest, share);
  }
  return nearest;
}

/**
 * What the eyes see: distances (`SIGHT` for nothing) and kinds.
 * @typedef {{distance: Float64Array, kind: Int8Array}} View
 */

/** @typedef {{x: number, y: number, poison: boolean, present: boolean, born: number}} Item */

/**
 * The agent's 27 inputs: 1, except the slot of what an eye sees, which has its distance as a share of sight.
 * @param {View} view
 */
export function viewInputs({ distance, kind }) {
  const inputs = new Float64Array(N_INPUTS).fill(1);
  kind.forEach((seen, eye) => {
    if (seen !== NOTHING) inputs[3 * eye + seen] = distance[eye] / SIGHT;
  });
  return inputs;
}

/** One world with one agent. */
export class World {
  /** @param {number} seed of items and chances */
  constructor(seed) {
    this.chance = uniforms(seed, 0);
    this.clock = 0;
    this.x = 50;
    this.y = 50;
    this.angle = 0;
    /** @type {Item[]} */
    this.items = Array.from({ length: N_ITEMS }, () => this.newItem());
  }

  /** @returns {Item} */
  newItem() {
    const x = MARGIN + (WIDTH - 2 * MARGIN) * this.chance();
    const y = MARGIN + (HEIGHT - 2 * MARGIN) * this.chance();
    return { x, y, poison: this.chance() < 0.5, present: true, born: this.clock };
  }

  /**
   * The direction of an eye; they are not symmetric, so in the authors' files.
   * @param {number} eye
   */
  eyeAngle(eye) {
    return this.angle + (eye - 3) * 0.25;
  }

  /**
   * What the eyes see now: along each ray the nearest of walls and items.
   * @returns {View}
   */
  view() {
    const distance = new Float64Array(N_EYES).fill(SIGHT);
    const kind = new Int8Array(N_EYES).fill(NOTHING);
    for (let eye = 0; eye < N_EYES; eye += 1) {
      const [rayX, rayY] = [Math.sin(this.eyeAngle(eye)), Math.cos(this.eyeAngle(eye))];
      let nearest = crossing(this.x, this.y, this.x + SIGHT * rayX, this.y + SIGHT * rayY) * SIGHT;
      if (nearest < Infinity) kind[eye] = WALL;
      for (const item of this.items) {
        if (!item.present) continue;
        const [dx, dy] = [item.x - this.x, item.y - this.y];
        const along = rayX * dx + rayY * dy;
        const across = Math.abs(rayX * dy - rayY * dx);
        if (across <= ITEM_RADIUS && along > 0 && along < SIGHT && along < nearest) {
          nearest = along;
          kind[eye] = item.poison ? POISON : FOOD;
        }
      }
      distance[eye] = Math.min(nearest, SIGHT);
    }
    return { distance, kind };
  }

  /**
   * Moves the agent, lets it eat, renews items; returns the reward.
   * @param {number} action a number of `ACTIONS` @param {View} view what the agent saw when it chose
   */
  act(action, { distance, kind }) {
    this.clock += 1;
    this.move(ACTIONS[action][0], ACTIONS[action][1]);
    const eaten = this.eat();
    this.renew();
    let open = 0;
    kind.forEach((seen, eye) => {
      open += (seen === WALL ? distance[eye] / SIGHT : 1) / N_EYES;
    });
    const openness = Math.min(1, OPENNESS_FACTOR * open);
    const bonus = action === FORWARD && openness > CLEAR_VIEW ? FORWARD_BONUS * openness : 0;
    return openness + bonus + eaten;
  }

  /**
   * The mean of the centre turned about each wheel; a step across a wall is undone, the turn is not.
   * @param {number} first @param {number} second
   */
  move(first, second) {
    const across = this.angle + Math.PI / 2;
    const x = this.x + 0.25 * AGENT_RADIUS * (Math.sin(across - first) - Math.sin(across + second));
    const y = this.y + 0.25 * AGENT_RADIUS * (Math.cos(across - first) - Math.cos(across + second));
    if (crossing(this.x, this.y, x, y) === Infinity) {
      this.x = Math.min(WIDTH, Math.max(0, x));
      this.y = Math.min(HEIGHT, Math.max(0, y));
    }
    const turn = 2 * Math.PI;
    this.angle = (((this.angle - first + second) % turn) + turn) % turn;
  }

  /** Takes the items the agent touches with no wall between; returns what they are worth. */
  eat() {
    let worth = 0;
    for (const item of this.items) {
      const near = (item.x - this.x) ** 2 + (item.y - this.y) ** 2 < (ITEM_RADIUS + AGENT_RADIUS) ** 2;
      if (!item.present || !near || crossing(this.x, this.y, item.x, item.y) < Infinity) continue;
      item.present = false;
      worth += item.poison ? POISON_REWARD : FOOD_REWARD;
    }
    return worth;
  }

  /** Removes some old items, adds one now and then where one is missing. */
  renew() {
    if (this.clock % REMOVAL_EVERY === 0) {
      for (const item of this.items) if (this.clock - item.born > OLD_AGE && this.chance() < REMOVAL_CHANCE) item.present = false;
    }
    if (this.clock % ARRIVAL_EVERY === 0) {
      const free = this.items.findIndex((item) => !item.present);
      if (free >= 0 && this.chance() < ARRIVAL_CHANCE) this.items[free] = this.newItem();
    }
  }
}
