/**
 * Reading a digit: strokes to pixels, a turn, and the draws of a LeNet with dropout before its last layer.
 *
 * The network is `experiments.digits.digit_network`, from the same file of 8-bit weights.
 */
/** @typedef {Record<string, {shape: number[], values: Int8Array | Float32Array}>} Tensors */
/** A line through points, in pixels. @typedef {number[][]} Stroke */

export const SIDE = 28;
export const N_CLASSES = 10;
export const DROP_PROB = 0.5;
const INK_BOX = 20; // MNIST scales its digits to this box, and puts their centre of mass into the middle
const PEN_RADIUS = 1.15;

/**
 * A safetensors file: the length of a JSON header, the header, the numbers.
 * @param {Uint8Array} bytes
 * @returns {Tensors}
 */
export function readTensors(bytes) {
  const data = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(data.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  /** @type {Tensors} */
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    const part = bytes.slice(8 + length + from, 8 + length + to).buffer;
    tensors[name] = { shape, values: dtype === "I8" ? new Int8Array(part) : new Float32Array(part) };
  }
  return tensors;
}

/**
 * The weights of a layer in float32: 8-bit numbers times the scale of their output unit.
 * @param {Tensors} tensors @param {string} at
 */
function layerOf(tensors, at) {
  const { values, shape } = tensors[`${at}.weight`];
  const scale = tensors[`${at}.scale`].values;
  const perUnit = values.length / shape[0];
  return { shape, weight: Float32Array.from(values, (value, k) => value * scale[Math.floor(k / perUnit)]), bias: tensors[`${at}.bias`].values };
}

/**
 * The layers of the network, restored from its file.
 * @param {Tensors} tensors
 */
export function restoredLayers(tensors) {
  return { first: layerOf(tensors, "0"), second: layerOf(tensors, "2"), hidden: layerOf(tensors, "5"), last: layerOf(tensors, "8") };
}

/** @typedef {ReturnType<typeof layerOf>} Layer */
/** @typedef {ReturnType<typeof restoredLayers>} LeNet */

/**
 * A convolution and its maximum over squares of two by two, `[channel, row, column]`.
 * @param {ArrayLike<number>} input `[channel, side, side]` @param {number} side @param {Layer} layer
 */
function pooledConvolution(input, side, { shape: [nOut, nIn, kernel], weight, bias }) {
  const half = (side - kernel + 1) / 2;
  const result = new Float64Array(nOut * half * half).fill(-Infinity);
  for (let out = 0; out < nOut; out += 1) {
    for (let row = 0; row < 2 * half; row += 1) {
      for (let column = 0; column < 2 * half; column += 1) {
        let sum = bias[out];
        for (let channel = 0; channel < nIn; channel += 1) {
          for (let dy = 0; dy < kernel; dy += 1) {
            const from = (channel * side + row + dy) * side + column;
            const at = ((out * nIn + channel) * kernel + dy) * kernel;
            for (let dx = 0; dx < kernel; dx += 1) sum += input[from + dx] * weight[at + dx];
          }
        }
        const to = (out * half + (row >> 1)) * half + (column >> 1);
        if (sum > result[to]) result[to] = sum;
      }
    }
  }
  return result;
}

/**
 * The units before the dropout: the part of the network that all draws share.
 * @param {LeNet} network @param {ArrayLike<number>} image `[row, column]` in [0, 1]
 */
export function hiddenUnits(network, image) {
  const first = pooledConvolution(image, SIDE, network.first);
  const second = pooledConvolution(first, (SIDE - 4) / 2, network.second);
  const { weight, bias } = network.hidden;
  return Float64Array.from(bias, (value, unit) => {
    let sum = value;
    for (let k = 0; k < second.length; k += 1) sum += weight[unit * second.length + k] * second[k];
    return Math.max(sum, 0);
  });
}

/**
 * The softmax inputs of every draw, `[draw, class]`.
 * @param {LeNet} network @param {Float64Array} hidden @param {Uint8Array} masks `[draw, unit]`
 */
export function drawLogits(network, hidden, masks) {
  const { weight, bias } = network.last;
  const units = hidden.length;
  const nDraws = masks.length / units;
  const result = new Float64Array(nDraws * N_CLASSES);
  for (let draw = 0; draw < nDraws; draw += 1) {
    for (let kind = 0; kind < N_CLASSES; kind += 1) {
      let sum = 0;
      for (let unit = 0; unit < units; unit += 1) if (masks[draw * units + unit]) sum += hidden[unit] * weight[kind * units + unit];
      result[draw * N_CLASSES + kind] = bias[kind] + sum / (1 - DROP_PROB);
    }
  }
  return result;
}

/**
 * Each draw's softmax, `[draw, class]`.
 * @param {Float64Array} logits
 */
export function softmax(logits) {
  const result = new Float64Array(logits.length);
  for (let from = 0; from < logits.length; from += N_CLASSES) {
    const draw = logits.subarray(from, from + N_CLASSES);
    const largest = Math.max(...draw);
    let total = 0;
    for (let kind = 0; kind < N_CLASSES; kind += 1) total += Math.exp(draw[kind] - largest);
    for (let kind = 0; kind < N_CLASSES; kind += 1) result[from + kind] = Math.exp(draw[kind] - largest) / total;
  }
  return result;
}

/**
 * The mean probabilities, their entropy, and the mutual information of label and function, in nats.
 * @param {Float64Array} probabilities `[draw, class]`
 */
export function uncertainty(probabilities) {
  const nDraws = probabilities.length / N_CLASSES;
  const mean = new Float64Array(N_CLASSES);
  let expected = 0;
  probabilities.forEach((p, k) => {
    mean[k % N_CLASSES] += p / nDraws;
    expected -= p > 0 ? (p * Math.log(p)) / nDraws : 0;
  });
  const entropy = mean.reduce((sum, p) => sum - (p > 0 ? p * Math.log(p) : 0), 0);
  return { mean, entropy, mutualInformation: Math.max(entropy - expected, 0) };
}

/**
 * The image turned anticlockwise about its centre, linear between pixels, nothing outside.
 * @param {ArrayLike<number>} image @param {number} degrees
 */
export function rotatedImage(image, degrees) {
  const angle = (degrees * Math.PI) / 180;
  const [cosine, sine, middle] = [Math.cos(angle), Math.sin(angle), (SIDE - 1) / 2];
  const pixel = (/** @type {number} */ row, /** @type {number} */ column) =>
    row >= 0 && row < SIDE && column >= 0 && column < SIDE ? image[row * SIDE + column] : 0;
  return Float64Array.from({ length: SIDE * SIDE }, (_, k) => {
    const [dx, dy] = [(k % SIDE) - middle, Math.floor(k / SIDE) - middle];
    const [x, y] = [cosine * dx - sine * dy + middle, sine * dx + cosine * dy + middle];
    const [left, top] = [Math.floor(x), Math.floor(y)];
    const [right, bottom] = [x - left, y - top];
    const upper = (1 - right) * pixel(top, left) + right * pixel(top, left + 1);
    const lower = (1 - right) * pixel(top + 1, left) + right * pixel(top + 1, left + 1);
    return (1 - bottom) * upper + bottom * lower;
  });
}

/**
 * Strokes as an image in [0, 1], drawn with a round pen.
 * @param {Stroke[]} strokes
 */
export function ink(strokes) {
  return Float64Array.from({ length: SIDE * SIDE }, (_, k) => {
    const [x, y] = [(k % SIDE) + 0.5, Math.floor(k / SIDE) + 0.5];
    let distance = Infinity;
    for (const stroke of strokes) {
      stroke.forEach((end, at) => {
        distance = Math.min(distance, distanceToSegment(x, y, stroke[Math.max(at - 1, 0)], end));
      });
    }
    return Math.max(0, Math.min(1, PEN_RADIUS + 0.5 - distance));
  });
}

/** @param {number} x @param {number} y @param {number[]} start @param {number[]} end */
function distanceToSegment(x, y, start, end) {
  const [dx, dy] = [end[0] - start[0], end[1] - start[1]];
  const length = dx * dx + dy * dy;
  const share = length === 0 ? 0 : Math.max(0, Math.min(1, ((x - start[0]) * dx + (y - start[1]) * dy) / length));
  return Math.hypot(x - start[0] - share * dx, y - start[1] - share * dy);
}

/**
 * The strokes as MNIST would have them: scaled to its box, their ink's centre of mass in the middle.
 * @param {Stroke[]} strokes
 * @returns {Stroke[]}
 */
export function centredStrokes(strokes) {
  const points = strokes.flat();
  if (points.length === 0) return strokes;
  const [xs, ys] = [points.map((point) => point[0]), points.map((point) => point[1])];
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = Math.min(2, (INK_BOX - 2 * PEN_RADIUS) / Math.max(right - left, bottom - top, 4));
  const move = (/** @type {number} */ dx, /** @type {number} */ dy, /** @type {Stroke[]} */ lines) => lines.map((line) => line.map(([x, y]) => [x + dx, y + dy]));
  const boxed = strokes.map((line) => line.map(([x, y]) => [(x - (left + right) / 2) * scale + SIDE / 2, (y - (top + bottom) / 2) * scale + SIDE / 2]));
  let [mass, momentX, momentY] = [0, 0, 0];
  ink(boxed).forEach((value, k) => {
    mass += value;
    momentX += value * ((k % SIDE) + 0.5);
    momentY += value * (Math.floor(k / SIDE) + 0.5);
  });
  return move(SIDE / 2 - momentX / mass, SIDE / 2 - momentY / mass, boxed);
}

/**
 * A part of an ellipse as a stroke; degrees clockwise from the right.
 * @param {number} x @param {number} y @param {number} radiusX @param {number} radiusY @param {number} from @param {number} to
 * @returns {Stroke}
 */
function arc(x, y, radiusX, radiusY, from, to) {
  return Array.from({ length: 17 }, (_, k) => {
    const angle = ((from + ((to - from) * k) / 16) * Math.PI) / 180;
    return [x + radiusX * Math.cos(angle), y + radiusY * Math.sin(angle)];
  });
}

/** A written form of every digit. @type {Stroke[][]} */
export const DIGITS = [
  [arc(14, 14, 5.5, 8.5, 0, 360)],
  [[[15.5, 5], [12.5, 23]]],
  [[...arc(13.5, 9.5, 5, 4.5, 190, 390), [8.5, 22.5]], [[8.5, 22.5], [20, 22]]],
  [[...arc(13, 9.5, 5, 4.3, 200, 440)], [...arc(13, 18.3, 5.5, 4.5, 270, 520)]],
  [[[10, 5.5], [8.5, 14.5], [19.5, 14]], [[17.5, 6], [15.5, 23]]],
  [[[19, 5.5], [11, 5.8], [10, 13]], [...arc(12.8, 17.2, 5.6, 5, 240, 500)]],
  [[[16.5, 5], [11.5, 11], [9.3, 17]], arc(13.7, 18, 4.6, 4.6, 180, 540)],
  [[[8.5, 6.5], [19.5, 6], [13, 23]]],
  [arc(14, 9.3, 4.3, 4.3, 90, 450), arc(14, 18.3, 4.9, 4.7, -90, 270)],
  [arc(13.5, 9.7, 4.6, 4.5, 0, 360), [[18.1, 9.5], [17.5, 16], [15, 23]]],
];
