/** The picture of points, band, draws and process, and the ratio of deviations below it. */
import { byId } from "./document.js";
import { linearScale, plainNumber, Surface, ticks } from "./plot.js";

/** @typedef {import("./scenes.js").Point} Point */
/** @typedef {import("./scenes.js").Scene} Scene */
/** @typedef {import("./scenes.js").Unit} Unit */
/** @typedef {import("./state.js").Settings} Settings */
/** @typedef {import("./plot.js").Scale} Scale */

/**
 * What a trained network says along the grid.
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

/** @typedef {{grid: Float64Array, mean: Float64Array, variance: Float64Array}} Process */

/**
 * @typedef {object} Content
 * @property {Scene} scene
 * @property {Settings} settings
 * @property {Point[]} points
 * @property {Band | null} band
 * @property {Process | null} process
 * @property {Point | null} cursor of the keyboard
 * @property {Point | null} grasped the point that is being dragged
 */

const LEFT = 44; // pixels for the labels of the axes
const BOTTOM = 26;
const EDGE = 10;
const NARROW = 520; // where the label of y must stand below the status

/** The two canvases of the view of points. */
export class PointsPicture {
  constructor() {
    this.plot = new Surface(byId("plot"));
    this.ratio = new Surface(byId("ratio"));
  }

  /** @param {Scene} scene */
  scales(scene) {
    return {
      x: linearScale(scene.xRange, LEFT, this.plot.width - EDGE),
      y: linearScale(scene.yRange, this.plot.height - BOTTOM, EDGE),
    };
  }

  /** @param {Content} content */
  draw(content) {
    const { scene, settings, band } = content;
    this.plot.begin();
    const { x, y } = this.scales(scene);
    this.plot.axes(x, y, ...roundTicks(scene.x, scene.y, x, y));
    this.plot.inside(x, y, () => {
      if (band) this.drawBand(content, band, x, y);
      this.drawPoints(content, x, y);
    });
    this.plot.axisLabels(x, y, { x: scene.x.label, y: scene.y.label }, this.plot.width < NARROW ? 24 : 4);
    if (settings.process) this.drawRatio(content);
  }

  /** @param {Content} content @param {Band} band @param {Scale} x @param {Scale} y */
  drawBand({ settings, process }, { grid, mean, epistemic, standard, draws, precision }, x, y) {
    const { plot } = this;
    const noise = 1 / precision;
    const around = (/** @type {number} */ k, /** @type {number} */ extra) => mean.map((value, at) => value + k * Math.sqrt(epistemic[at] + extra));
    for (const k of [2, 1]) {
      if (settings.total) plot.band(x, y, grid, around(-k, noise), around(k, noise), { colour: "total", alpha: 0.3 });
    }
    for (const k of [2, 1]) {
      if (settings.epistemic) plot.band(x, y, grid, around(-k, 0), around(k, 0), { colour: "epistemic", alpha: 0.3 });
    }
    if (settings.draws) plot.curves(x, y, grid, draws, { colour: "draws", alpha: 0.3 });
    if (settings.process && process) this.drawProcess(process, x, y);
    if (settings.mean) plot.curve(x, y, grid, mean, { colour: "mean", width: 2.5 });
    if (settings.standard) plot.curve(x, y, grid, standard, { colour: "standard", width: 2.5, dash: [2, 4] });
    if (settings.oneDraw) {
      const at = Math.min(settings.draw, draws.length / grid.length - 1) * grid.length;
      plot.curve(x, y, grid, draws.subarray(at, at + grid.length), { colour: "one", width: 2 });
    }
  }

  /** @param {Process} process @param {Scale} x @param {Scale} y */
  drawProcess({ grid, mean, variance }, x, y) {
    for (const k of [-2, 2]) {
      const edge = mean.map((value, at) => value + k * Math.sqrt(variance[at]));
      this.plot.curve(x, y, grid, edge, { colour: "process", width: 1.5, dash: [6, 4] });
    }
    this.plot.curve(x, y, grid, mean, { colour: "process", width: 2 });
  }

  /** @param {Content} content @param {Scale} x @param {Scale} y */
  drawPoints({ points, cursor, grasped }, x, y) {
    const { context } = this.plot;
    context.fillStyle = this.plot.colour("point");
    context.strokeStyle = this.plot.colour("paper");
    context.lineWidth = 1.5;
    const radius = points.length > 60 ? 3.5 : 4.5;
    for (const point of points) {
      context.beginPath();
      context.arc(x(point.x), y(point.y), point === grasped ? radius + 2 : radius, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    }
    if (!cursor) return;
    context.strokeStyle = this.plot.colour("focus");
    context.beginPath();
    const [left, top] = [x(cursor.x), y(cursor.y)];
    for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      context.moveTo(left + 5 * dx, top + 5 * dy);
      context.lineTo(left + 13 * dx, top + 13 * dy);
    }
    context.stroke();
  }

  /**
   * The network's epistemic deviation over the process's, on a logarithmic scale.
   * @param {Content} content
   */
  drawRatio({ scene, band, process }) {
    const { ratio } = this;
    const context = ratio.begin();
    const x = linearScale(scene.xRange, LEFT, ratio.width - EDGE);
    const y = linearScale([-3.4, 3.4], ratio.height - 4, 4);
    const names = new Map([[-3, "⅛"], [-2, "¼"], [-1, "½"], [0, "1"], [1, "2"], [2, "4"], [3, "8"]]);
    ratio.axes(x, y, { x: () => "", y: (value) => names.get(value) ?? "" }, { x: [], y: [-2, 0, 2] });
    context.strokeStyle = ratio.colour("faint");
    context.beginPath();
    context.moveTo(x(x.range[0]), y(0));
    context.lineTo(x(x.range[1]), y(0));
    context.stroke();
    if (!band || !process || process.grid.length !== band.grid.length || process.grid[0] !== band.grid[0]) return;
    const logs = band.epistemic.map((value, k) => 0.5 * Math.log2(Math.max(value, 1e-12) / Math.max(process.variance[k], 1e-12)));
    ratio.inside(x, y, () => {
      ratio.band(x, y, band.grid, logs.map(() => 0), logs, { colour: "process", alpha: 0.18 });
      ratio.curve(x, y, band.grid, logs, { colour: "process", width: 2 });
    });
    ratio.axisLabels(x, y, { x: "", y: "deviation: network over process" });
  }
}

/**
 * Places and texts of ticks that are round in the scene's units.
 * @param {Unit} unitX @param {Unit} unitY @param {Scale} x @param {Scale} y
 * @returns {[{x: (v: number) => string, y: (v: number) => string}, {x: number[], y: number[]}]}
 */
function roundTicks(unitX, unitY, x, y) {
  const places = (/** @type {Unit} */ unit, /** @type {Scale} */ scale, /** @type {number} */ count) => {
    const shown = (/** @type {number} */ value) => unit.offset + unit.scale * value;
    const [from, to] = [shown(scale.range[0]), shown(scale.range[1])];
    return ticks([from, to], count).map((value) => (value - unit.offset) / unit.scale);
  };
  const text = (/** @type {Unit} */ unit) => (/** @type {number} */ value) => plainNumber(Number((unit.offset + unit.scale * value).toFixed(6)));
  const width = Math.abs(x(x.range[1]) - x(x.range[0]));
  const height = Math.abs(y(y.range[1]) - y(y.range[0]));
  return [{ x: text(unitX), y: text(unitY) }, { x: places(unitX, x, width / 70), y: places(unitY, y, height / 50) }];
}
