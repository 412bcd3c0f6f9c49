/** Points added, moved and erased with mouse, finger or keyboard. */
import { speak } from "./document.js";
import { shortNumber } from "./plot.js";
import { roundCoordinate } from "./scenes.js";
import { MOST_POINTS } from "./state.js";

/** @typedef {import("./scenes.js").Point} Point */
/** @typedef {import("./scenes.js").Scene} Scene */
/** @typedef {import("./scenes.js").Unit} Unit */
/** @typedef {import("./plot.js").Scale} Scale */
/** @typedef {import("./points_picture.js").Band} Band */

/**
 * What the editor needs of the view it edits.
 * @typedef {object} Host
 * @property {Point[]} points
 * @property {Scene} scene
 * @property {Band | null} band
 * @property {() => {x: Scale, y: Scale}} scales
 * @property {(points: Point[]) => void} setPoints
 * @property {() => void} redraw
 */

const REACH = 14; // pixels within which a point is grasped
const FINGER_REACH = 24;
const HOLD = 500; // milliseconds a finger rests on a point to erase it

/** The hand and the keyboard on the plot. */
export class PointEditor {
  /** @param {HTMLCanvasElement} canvas @param {Host} host */
  constructor(canvas, host) {
    this.canvas = canvas;
    this.host = host;
    this.isErasing = false;
    this.isWiping = false;
    this.holding = 0;
    /** @type {Point | null} */
    this.cursor = null;
    /** @type {Point | null} */
    this.grasped = null;
    this.bind();
  }

  bind() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        this.grasped = null;
        this.isWiping = false;
        clearTimeout(this.holding);
        this.host.redraw();
      });
    }
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => {
      this.cursor = null;
      this.host.redraw();
    });
  }

  /** @param {PointerEvent} event */
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const { x, y } = this.host.scales();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    const inside = (/** @type {number} */ value, /** @type {[number, number]} */ [low, high]) => Math.min(high, Math.max(low, value));
    return { x: roundCoordinate(inside(x.inverse(left), x.range)), y: roundCoordinate(inside(y.inverse(top), y.range)) };
  }

  /**
   * The nearest point within reach.
   * @param {PointerEvent} event
   */
  pointAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const { x, y } = this.host.scales();
    const reach = event.pointerType === "touch" ? FINGER_REACH : REACH;
    const distance = (/** @type {Point} */ point) => Math.hypot(x(point.x) + box.left - event.clientX, y(point.y) + box.top - event.clientY);
    return this.host.points.reduce((/** @type {Point | null} */ best, point) => (distance(point) <= (best ? distance(best) : reach) ? point : best), null);
  }

  /** @param {PointerEvent} event */
  press(event) {
    this.canvas.focus({ preventScroll: true });
    this.cursor = null;
    const point = this.pointAt(event);
    if (this.isErasing || event.button === 2 || event.altKey) {
      this.isWiping = true;
      if (point) this.erase(point);
    } else if (event.button === 0) {
      this.grasped = point ?? this.add(this.place(event));
      if (point && event.pointerType === "touch") this.holding = window.setTimeout(() => this.erase(point), HOLD);
    }
    try {
      this.canvas.setPointerCapture(event.pointerId);
    } catch {
      // A pointer that is gone again cannot be captured, and need not be.
    }
  }

  /** @param {PointerEvent} event */
  drag(event) {
    if (this.isWiping) {
      const point = this.pointAt(event);
      if (point) this.erase(point);
    }
    if (!this.grasped) return;
    const at = this.place(event);
    if (at.x === this.grasped.x && at.y === this.grasped.y) return;
    clearTimeout(this.holding);
    const index = this.host.points.indexOf(this.grasped);
    this.grasped = at;
    if (index >= 0) this.host.setPoints(this.host.points.map((point, k) => (k === index ? at : point)));
  }

  /**
   * @param {Point} point
   * @returns {Point | null}
   */
  add(point) {
    if (this.host.points.length >= MOST_POINTS) {
      speak(`There are ${MOST_POINTS} points, the most this page takes.`);
      return null;
    }
    this.host.setPoints([...this.host.points, point]);
    return point;
  }

  /** @param {Point} point */
  erase(point) {
    this.grasped = null;
    this.host.setPoints(this.host.points.filter((other) => other !== point));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const [[left, right], [low, high]] = [this.host.scene.xRange, this.host.scene.yRange];
    const cursor = this.cursor ?? { x: (left + right) / 2, y: (low + high) / 2 };
    const step = event.shiftKey ? 0.1 : 0.02;
    const [dx, dy] = [step * (right - left), step * (high - low)];
    /** @type {Record<string, () => Point>} */
    const moves = {
      ArrowLeft: () => ({ x: cursor.x - dx, y: cursor.y }),
      ArrowRight: () => ({ x: cursor.x + dx, y: cursor.y }),
      ArrowUp: () => ({ x: cursor.x, y: cursor.y + dy }),
      ArrowDown: () => ({ x: cursor.x, y: cursor.y - dy }),
      Home: () => ({ x: left, y: cursor.y }),
      End: () => ({ x: right, y: cursor.y }),
    };
    if (event.key in moves) {
      const { x, y } = moves[event.key]();
      this.cursor = { x: roundCoordinate(Math.min(right, Math.max(left, x))), y: roundCoordinate(Math.min(high, Math.max(low, y))) };
      this.sayCursor();
    } else if (event.key === "Enter" || event.key === " ") {
      this.cursor = cursor;
      if (this.add({ ...cursor })) speak(`Point added, ${this.host.points.length} in all.`);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.eraseNearest(cursor);
    } else {
      return;
    }
    event.preventDefault();
    this.host.redraw();
  }

  /** @param {Point} cursor */
  eraseNearest(cursor) {
    const { x, y } = this.host.scales();
    const distance = (/** @type {Point} */ point) => Math.hypot(x(point.x) - x(cursor.x), y(point.y) - y(cursor.y));
    const [nearest] = [...this.host.points].sort((a, b) => distance(a) - distance(b));
    if (!nearest) return;
    this.erase(nearest);
    this.cursor = cursor;
    speak(`Point erased, ${this.host.points.length} left.`);
  }

  /** Tells the place of the cursor and what the network says there. */
  sayCursor() {
    const { cursor } = this;
    const { band, scene } = this.host;
    if (!cursor || !band) return;
    const [left, right] = scene.xRange;
    const at = Math.round(((cursor.x - left) / (right - left)) * (band.grid.length - 1));
    const printed = (/** @type {Unit} */ unit, /** @type {number} */ value) => shortNumber(unit.offset + unit.scale * value);
    const { x, y } = scene;
    speak(`${x.label} ${printed(x, cursor.x)}, ${y.label} ${printed(y, cursor.y)}. Mean ${printed(y, band.mean[at])}, epistemic deviation ${shortNumber(y.scale * Math.sqrt(band.epistemic[at]))}.`);
  }
}
