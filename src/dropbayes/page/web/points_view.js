/** The view of points: the plot that is drawn on, its controls, and the worker that trains. */
import { byId, copyText, speak } from "./document.js";
import { linearScale, plainNumber, shortNumber, Surface, ticks } from "./plot.js";
import { pythonCode } from "./python_code.js";
import { rounded, SCENES } from "./scenes.js";
import { DEFAULTS, encoded, MOST_POINTS, parsedSetting, RANGES } from "./state.js";

/** @typedef {import("./scenes.js").Point} Point */
/** @typedef {import("./scenes.js").Unit} Unit */
/** @typedef {import("./state.js").Settings} Settings */
/** @typedef {import("./state.js").State} State */
/** @typedef {import("./plot.js").Scale} Scale */

/**
 * @typedef {object} Band
 * @property {Float64Array} grid
 * @property {Float64Array} draws `[draw, place]`
 * @property {Float64Array} mean
 * @property {Float64Array} epistemic
 * @property {Float64Array} standard
 * @property {import("./network.js").Network} network
 * @property {number} precision
 * @property {number[]} decays
 * @property {number} step
 * @property {boolean} isTraining
 * @property {Settings} settings
 */

const REACH = 14; // pixels within which a point is grasped
const FINGER_REACH = 24;
const TWEEN = 120; // milliseconds in which a new band takes the place of the old one
const CALM_FRAME = 600; // milliseconds between bands where motion is to be reduced
const HOLD = 500; // milliseconds a finger rests on a point to erase it

/** What each slider shows: a position from 0 to 100 for a number, on a logarithmic scale where `isLog`. */
const SLIDERS = /** @type {const} */ ({
  dropProb: { isLog: true, shown: (/** @type {number} */ v) => shortNumber(v) },
  precision: { isLog: true, shown: (/** @type {number} */ v) => `${shortNumber(v)} (noise ${shortNumber(v ** -0.5)})` },
  lengthScale: { isLog: true, shown: (/** @type {number} */ v) => shortNumber(v) },
  width: { isLog: false, shown: String },
  depth: { isLog: false, shown: String },
  nDraws: { isLog: false, shown: String },
});
const TOGGLES = /** @type {const} */ (["total", "epistemic", "mean", "draws", "oneDraw", "standard", "process", "learnPrecision"]);
const CHOICES = /** @type {const} */ (["activation", "covariance"]);
const NUMBERS = /** @type {const} */ (["seed", "draw"]);

/**
 * The settings of a scene, or null if there is none of that name.
 * @param {string} name
 */
export function sceneSettings(name) {
  return Object.hasOwn(SCENES, name) ? { ...DEFAULTS, ...SCENES[name].settings } : null;
}

/** The tab in which points are drawn. */
export class PointsView {
  /** @param {State} state @param {() => Worker} startWorker @param {() => void} changed tells that the state differs */
  constructor(state, startWorker, changed) {
    this.state = state;
    this.changed = changed;
    this.worker = startWorker();
    this.worker.addEventListener("message", ({ data }) => (data.task === "band" ? this.showBand(data) : this.showProcess(data)));
    this.plot = new Surface(byId("plot"));
    this.ratio = new Surface(byId("ratio"));
    /** @type {Band | null} */
    this.band = null;
    /** @type {Band | null} */
    this.before = null;
    this.bandTime = 0;
    /** @type {{grid: Float64Array, mean: Float64Array, variance: Float64Array} | null} */
    this.process = null;
    this.isRunning = true;
    this.isErasing = false;
    this.isVisible = true;
    this.restarts = 0;
    this.isSent = true;
    this.frame = 0;
    /** @type {Point | null} */
    this.cursor = null;
    /** @type {Point | null} */
    this.grasped = null;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.buildScenes();
    this.bindControls();
    this.bindPlot();
    this.showControls();
    this.send();
  }

  get scene() {
    return SCENES[this.state.scene];
  }

  get points() {
    return this.state.points ?? this.scene.points;
  }

  /** @param {Point[]} points */
  setPoints(points) {
    this.state.points = points;
    this.update();
  }

  /** After a change of points or settings: the worker is told once in a frame. */
  update() {
    this.changed();
    this.redraw();
    if (!this.isSent) return;
    this.isSent = false;
    requestAnimationFrame(() => this.send());
  }

  send() {
    this.isSent = true;
    this.worker.postMessage({
      task: "band",
      settings: this.state.settings,
      x: this.points.map(({ x }) => x),
      y: this.points.map(({ y }) => y),
      range: this.scene.xRange,
      running: this.isRunning && this.isVisible,
      restarts: this.restarts,
    });
  }

  /** @param {boolean} isVisible */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.send();
    if (isVisible) this.redraw();
  }

  /** @param {State} state */
  setState(state) {
    this.state = state;
    this.process = null;
    this.showControls();
    this.update();
  }

  // Controls ----------------------------------------------------------------------------------------------------------

  buildScenes() {
    for (const [name, { title }] of Object.entries(SCENES)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = title;
      button.dataset.scene = name;
      button.addEventListener("click", () => {
        this.band = null;
        this.before = null;
        this.restarts += 1;
        const settings = /** @type {Settings} */ (sceneSettings(name));
        this.setState({ tab: "points", scene: name, points: null, settings });
      });
      byId("scenes").append(button);
    }
  }

  bindControls() {
    for (const [name, { isLog }] of Object.entries(SLIDERS)) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      const [least, greatest] = RANGES[name];
      Object.assign(input, isLog ? { min: "0", max: "100", step: "0.5" } : { min: String(least), max: String(greatest), step: "1" });
      input.addEventListener("input", () => {
        const position = Number(input.value);
        const exact = isLog ? least * (greatest / least) ** (position / 100) : position;
        this.change({ [name]: isLog ? Number(exact.toPrecision(3)) : exact });
      });
    }
    for (const name of TOGGLES) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      input.addEventListener("change", () => this.change({ [name]: input.checked }));
    }
    for (const name of CHOICES) {
      const select = /** @type {HTMLSelectElement} */ (byId(name));
      select.addEventListener("change", () => this.change({ [name]: select.value }));
    }
    for (const name of NUMBERS) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      input.addEventListener("input", () => {
        const value = parsedSetting(name, input.value);
        if (value !== undefined) this.change({ [name]: value });
      });
      input.addEventListener("blur", () => this.showControls());
    }
    this.bindButtons();
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  bindButtons() {
    byId("erase").addEventListener("click", () => {
      this.isErasing = !this.isErasing;
      this.showControls();
    });
    byId("clear").addEventListener("click", () => {
      this.restarts += 1;
      this.setPoints([]);
    });
    byId("restart").addEventListener("click", () => {
      // Another seed: other weights to start from, other masks.
      this.change({ seed: (this.state.settings.seed + 1) % RANGES.seed[1] });
    });
    byId("run").addEventListener("click", () => {
      this.isRunning = !this.isRunning;
      this.showControls();
      this.send();
    });
    byId("why").addEventListener("click", () => /** @type {HTMLDialogElement} */ (byId("limits")).showModal());
    byId("copy-python").addEventListener("click", () => copyText(this.python(), "The program is in the clipboard: paste it into Python."));
    byId("copy-link").addEventListener("click", () => copyText(this.address(), "The link is in the clipboard."));
  }

  /** @param {Partial<Settings>} changes */
  change(changes) {
    this.state.settings = { ...this.state.settings, ...changes };
    if ("process" in changes || "covariance" in changes) this.process = null;
    this.showControls();
    this.update();
  }

  showControls() {
    const { settings } = this.state;
    for (const [name, { isLog, shown }] of Object.entries(SLIDERS)) {
      const value = /** @type {number} */ (settings[/** @type {keyof Settings} */ (name)]);
      const [least, greatest] = RANGES[name];
      const input = /** @type {HTMLInputElement} */ (byId(name));
      input.value = String(isLog ? (100 * Math.log(value / least)) / Math.log(greatest / least) : value);
      input.setAttribute("aria-valuetext", shown(value));
      byId(`${name}-value`).textContent = shown(value);
    }
    for (const name of TOGGLES) /** @type {HTMLInputElement} */ (byId(name)).checked = settings[name];
    for (const name of CHOICES) /** @type {HTMLSelectElement} */ (byId(name)).value = settings[name];
    for (const name of NUMBERS) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      if (document.activeElement !== input) input.value = String(settings[name]);
    }
    /** @type {HTMLInputElement} */ (byId("precision")).disabled = settings.learnPrecision;
    byId("erase").setAttribute("aria-pressed", String(this.isErasing));
    byId("plot").classList.toggle("erasing", this.isErasing);
    byId("run").textContent = this.isRunning ? "Pause" : "Train";
    byId("run").setAttribute("aria-pressed", String(!this.isRunning));
    byId("ratio").hidden = !settings.process;
    byId("note").textContent = this.scene.note;
    for (const button of byId("scenes").children) {
      button.setAttribute("aria-current", String(/** @type {HTMLElement} */ (button).dataset.scene === this.state.scene));
    }
  }

  /** The program that makes what is on the screen. */
  python() {
    if (!this.band) return "";
    const { network, precision, grid, settings } = this.band;
    return pythonCode({ ...settings, network, points: this.points, precision, grid, draw: Math.min(this.state.settings.draw, settings.nDraws - 1) });
  }

  address() {
    const usual = /** @type {Settings} */ (sceneSettings(this.state.scene));
    return `${location.href.split("#")[0]}#${encoded(this.state, usual)}`;
  }

  // What the worker says ----------------------------------------------------------------------------------------------

  /** @param {Band} band */
  showBand(band) {
    const now = performance.now();
    if (this.calm.matches && band.isTraining && now - this.bandTime < CALM_FRAME) return;
    const isSame = this.band && this.band.draws.length === band.draws.length && this.band.grid[0] === band.grid[0];
    this.before = isSame && !this.calm.matches ? this.shownBand(now) : null;
    this.band = band;
    this.bandTime = now;
    this.describe(band);
    this.redraw();
  }

  /** @param {Band} band */
  describe(band) {
    const n = this.points.length;
    const count = n === 1 ? "1 point" : `${n} points`;
    const doing = n === 0 ? "click to add points" : band.isTraining ? `step ${band.step}` : this.isRunning ? `settled after ${band.step} steps` : "paused";
    byId("status").textContent = n === 0 ? doing : `${count} · ${doing}`;
    const [first, ...rest] = band.decays;
    const wide = rest.length > 1 ? `λ₂ … = ${shortNumber(rest[0])}` : `λ₂ = ${shortNumber(rest[0])}`;
    byId("decays").textContent = `λ₁ = ${shortNumber(first)},  ${wide}  (N = ${n})`;
    if (this.state.settings.learnPrecision) byId("precision-value").textContent = SLIDERS.precision.shown(band.precision);
  }

  /** @param {{grid: Float64Array, mean: Float64Array, variance: Float64Array}} process */
  showProcess(process) {
    this.process = process;
    this.redraw();
  }

  // Drawing -----------------------------------------------------------------------------------------------------------

  redraw() {
    if (!this.frame && this.isVisible) this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  /**
   * The band between the last one and the new one.
   * @param {number} now
   * @returns {Band | null}
   */
  shownBand(now) {
    const share = Math.min(1, (now - this.bandTime) / TWEEN);
    const { band, before } = this;
    if (!band || !before || share >= 1) return band;
    const mixed = (/** @type {"mean" | "epistemic" | "standard" | "draws"} */ name) => {
      const [from, to] = [before[name], band[name]];
      const result = new Float64Array(to.length);
      for (let k = 0; k < to.length; k += 1) result[k] = from[k] + share * (to[k] - from[k]);
      return result;
    };
    const { draws, oneDraw } = this.state.settings;
    return { ...band, mean: mixed("mean"), epistemic: mixed("epistemic"), standard: mixed("standard"), draws: draws || oneDraw ? mixed("draws") : band.draws };
  }

  scales() {
    const [width, height] = [this.plot.width, this.plot.height];
    return {
      x: linearScale(this.scene.xRange, 44, width - 10),
      y: linearScale(this.scene.yRange, height - 26, 10),
    };
  }

  /** @param {number} now */
  draw(now) {
    this.frame = 0;
    const context = this.plot.begin();
    const { x, y } = this.scales();
    this.plot.axes(x, y, { x: this.scene.x.label, y: this.scene.y.label }, ...labelled(this.scene.x, this.scene.y, x, y));
    const band = this.shownBand(now);
    this.plot.inside(x, y, () => {
      if (band) this.drawBand(band, x, y);
      this.drawPoints(context, x, y);
    });
    if (this.state.settings.process) this.drawRatio(band);
    if (this.before && now - this.bandTime < TWEEN) this.redraw();
  }

  /** @param {Band} band @param {Scale} x @param {Scale} y */
  drawBand({ grid, mean, epistemic, standard, draws, precision }, x, y) {
    const { plot } = this;
    const { settings } = this.state;
    const noise = 1 / precision;
    const around = (/** @type {number} */ k, /** @type {number} */ extra) => mean.map((value, at) => value + k * Math.sqrt(epistemic[at] + extra));
    for (const k of [2, 1]) {
      if (settings.total) plot.band(x, y, grid, around(-k, noise), around(k, noise), { colour: "total", alpha: 0.3 });
    }
    for (const k of [2, 1]) {
      if (settings.epistemic) plot.band(x, y, grid, around(-k, 0), around(k, 0), { colour: "epistemic", alpha: 0.3 });
    }
    if (settings.draws) plot.curves(x, y, grid, draws, { colour: "draws", alpha: 0.3 });
    if (settings.process && this.process) this.drawProcess(x, y);
    if (settings.mean) plot.curve(x, y, grid, mean, { colour: "mean", width: 2.5 });
    if (settings.standard) plot.curve(x, y, grid, standard, { colour: "standard", width: 2.5, dash: [2, 4] });
    if (settings.oneDraw) {
      const at = Math.min(settings.draw, draws.length / grid.length - 1) * grid.length;
      plot.curve(x, y, grid, draws.subarray(at, at + grid.length), { colour: "one", width: 2 });
    }
  }

  /** @param {Scale} x @param {Scale} y */
  drawProcess(x, y) {
    const { grid, mean, variance } = /** @type {NonNullable<PointsView["process"]>} */ (this.process);
    for (const k of [-2, 2]) {
      const edge = mean.map((value, at) => value + k * Math.sqrt(variance[at]));
      this.plot.curve(x, y, grid, edge, { colour: "process", width: 1.5, dash: [6, 4] });
    }
    this.plot.curve(x, y, grid, mean, { colour: "process", width: 2 });
  }

  /** @param {CanvasRenderingContext2D} context @param {Scale} x @param {Scale} y */
  drawPoints(context, x, y) {
    context.fillStyle = this.plot.colour("point");
    context.strokeStyle = this.plot.colour("paper");
    context.lineWidth = 1.5;
    const radius = this.points.length > 60 ? 3.5 : 4.5;
    for (const point of this.points) {
      context.beginPath();
      context.arc(x(point.x), y(point.y), point === this.grasped ? radius + 2 : radius, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    }
    if (!this.cursor) return;
    context.strokeStyle = this.plot.colour("focus");
    context.beginPath();
    const [left, top] = [x(this.cursor.x), y(this.cursor.y)];
    for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      context.moveTo(left + 5 * dx, top + 5 * dy);
      context.lineTo(left + 13 * dx, top + 13 * dy);
    }
    context.stroke();
  }

  /**
   * The network's epistemic deviation over the process's, on a logarithmic scale.
   * @param {Band | null} band
   */
  drawRatio(band) {
    const { ratio } = this;
    const context = ratio.begin();
    const x = linearScale(this.scene.xRange, 44, ratio.width - 10);
    const y = linearScale([-3.4, 3.4], ratio.height - 20, 4);
    const names = new Map([[-3, "⅛"], [-2, "¼"], [-1, "½"], [0, "1"], [1, "2"], [2, "4"], [3, "8"]]);
    ratio.axes(x, y, { x: "", y: "deviation: network over process" }, { x: () => "", y: (value) => names.get(value) ?? "" }, { x: [], y: [-2, 0, 2] });
    context.strokeStyle = ratio.colour("faint");
    context.beginPath();
    context.moveTo(x(x.range[0]), y(0));
    context.lineTo(x(x.range[1]), y(0));
    context.stroke();
    const { process } = this;
    if (!band || !process || process.grid.length !== band.grid.length || process.grid[0] !== band.grid[0]) return;
    const logs = band.epistemic.map((value, k) => 0.5 * Math.log2(Math.max(value, 1e-12) / Math.max(process.variance[k], 1e-12)));
    ratio.inside(x, y, () => {
      ratio.band(x, y, band.grid, logs.map(() => 0), logs, { colour: "process", alpha: 0.18 });
      ratio.curve(x, y, band.grid, logs, { colour: "process", width: 2 });
    });
  }

  // Pointer and keyboard ----------------------------------------------------------------------------------------------

  bindPlot() {
    const canvas = /** @type {HTMLCanvasElement} */ (byId("plot"));
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        this.grasped = null;
        this.isWiping = false;
        clearTimeout(this.holding);
        this.redraw();
      });
    }
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => {
      this.cursor = null;
      this.redraw();
    });
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  /** @param {PointerEvent} event */
  place(event) {
    const box = this.plot.canvas.getBoundingClientRect();
    const { x, y } = this.scales();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    const inside = (/** @type {number} */ value, /** @type {[number, number]} */ [low, high]) => Math.min(high, Math.max(low, value));
    return { x: rounded(inside(x.inverse(left), x.range)), y: rounded(inside(y.inverse(top), y.range)) };
  }

  /**
   * The nearest point within reach.
   * @param {PointerEvent} event
   */
  pointAt(event) {
    const box = this.plot.canvas.getBoundingClientRect();
    const { x, y } = this.scales();
    const reach = event.pointerType === "touch" ? FINGER_REACH : REACH;
    const distance = (/** @type {Point} */ point) => Math.hypot(x(point.x) + box.left - event.clientX, y(point.y) + box.top - event.clientY);
    return this.points.reduce((/** @type {Point | null} */ best, point) => (distance(point) <= (best ? distance(best) : reach) ? point : best), null);
  }

  /** @param {PointerEvent} event */
  press(event) {
    this.plot.canvas.focus({ preventScroll: true });
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
      this.plot.canvas.setPointerCapture(event.pointerId);
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
    const index = this.points.indexOf(this.grasped);
    this.grasped = at;
    if (index >= 0) this.setPoints(this.points.map((point, k) => (k === index ? at : point)));
  }

  /**
   * @param {Point} point
   * @returns {Point | null}
   */
  add(point) {
    if (this.points.length >= MOST_POINTS) {
      speak(`There are ${MOST_POINTS} points, the most this page takes.`);
      return null;
    }
    this.setPoints([...this.points, point]);
    return point;
  }

  /** @param {Point} point */
  erase(point) {
    this.grasped = null;
    this.setPoints(this.points.filter((other) => other !== point));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const [[left, right], [low, high]] = [this.scene.xRange, this.scene.yRange];
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
      this.cursor = { x: rounded(Math.min(right, Math.max(left, x))), y: rounded(Math.min(high, Math.max(low, y))) };
      this.sayCursor();
    } else if (event.key === "Enter" || event.key === " ") {
      this.cursor = cursor;
      if (this.add({ ...cursor })) speak(`Point added, ${this.points.length} in all.`);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.eraseNearest(cursor);
    } else {
      return;
    }
    event.preventDefault();
    this.redraw();
  }

  /** @param {Point} cursor */
  eraseNearest(cursor) {
    const { x, y } = this.scales();
    const distance = (/** @type {Point} */ point) => Math.hypot(x(point.x) - x(cursor.x), y(point.y) - y(cursor.y));
    const [nearest] = [...this.points].sort((a, b) => distance(a) - distance(b));
    if (!nearest) return;
    this.erase(nearest);
    this.cursor = cursor;
    speak(`Point erased, ${this.points.length} left.`);
  }

  /** Tells the place of the cursor and what the network says there. */
  sayCursor() {
    const { cursor, band } = this;
    if (!cursor || !band) return;
    const [left, right] = this.scene.xRange;
    const at = Math.round(((cursor.x - left) / (right - left)) * (band.grid.length - 1));
    const printed = (/** @type {Unit} */ unit, /** @type {number} */ value) => shortNumber(unit.offset + unit.scale * value);
    const { x, y } = this.scene;
    speak(`${x.label} ${printed(x, cursor.x)}, ${y.label} ${printed(y, cursor.y)}. Mean ${printed(y, band.mean[at])}, epistemic deviation ${shortNumber(y.scale * Math.sqrt(band.epistemic[at]))}.`);
  }
}

/**
 * Places and texts of ticks that are round in the scene's units.
 * @param {Unit} unitX @param {Unit} unitY @param {Scale} x @param {Scale} y
 * @returns {[{x: (v: number) => string, y: (v: number) => string}, {x: number[], y: number[]}]}
 */
function labelled(unitX, unitY, x, y) {
  const places = (/** @type {Unit} */ unit, /** @type {Scale} */ scale, /** @type {number} */ count) => {
    const shown = (/** @type {number} */ value) => unit.offset + unit.scale * value;
    const [from, to] = [shown(scale.range[0]), shown(scale.range[1])];
    return ticks([from, to], count).map((value) => (value - unit.offset) / unit.scale);
  };
  const text = (/** @type {Unit} */ unit) => (/** @type {number} */ value) => plainNumber(Number((unit.offset + unit.scale * value).toFixed(6)));
  const width = Math.abs(x(x.range[1]) - x(x.range[0]));
  const height = Math.abs(y(y.range[1]) - y(y.range[0]));
  return [{ x: text(unitX), y: text(unitY) }, { x: places(unitX, x, width / 90), y: places(unitY, y, height / 50) }];
}
