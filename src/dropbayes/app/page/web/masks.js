/**
 * Keyed masks: the generator of docs/masks.md, step by step, bit for bit the masks of dropbayes in Python.
 *
 * JavaScript has no 64-bit integers that are fast, so a word is two halves of 32 bits. The hash leaves its result in
 * one array: a returned pair would be an allocation for every word.
 */

/**
 * What the masks of one prediction depend on besides their coordinates.
 * @typedef {{seed: number, nDraws: number, sampler: "stratified" | "independent", replicate: number}} Keys
 */

/** @typedef {{high: number, low: number}} Word */

const UNIT = 1;
const ROW = 2;
const DRAW = 3;
const TURN = 4;
const TABLE_ENTRIES = 2 ** 20;
const MOST_PERMUTATIONS = 256;
/** The key of the permutations, 0x6D61736B73. */
const PERMUTATION_KEY = { high: 0x6d, low: 0x61736b73 };

/** The last hash: its high and its low half. An array, because variables above 2^31 would be boxed numbers. */
const last = new Uint32Array(2);

/**
 * The upper half of the product of two 32-bit words, from products of their 16-bit halves.
 * @param {number} a @param {number} b
 */
function upperProduct(a, b) {
  const a0 = a & 0xffff;
  const a1 = a >>> 16;
  const b0 = b & 0xffff;
  const b1 = b >>> 16;
  const middle = (Math.imul(a0, b1) + (Math.imul(a0, b0) >>> 16)) | 0;
  const other = (Math.imul(a1, b0) + (middle & 0xffff)) | 0;
  return (Math.imul(a1, b1) + (middle >>> 16) + (other >>> 16)) | 0;
}

/**
 * Step 1: SplitMix64's output `n` of the stream `key`, left in `last`.
 * @param {number} keyHigh @param {number} keyLow @param {number} n a non-negative safe integer
 */
function hash(keyHigh, keyLow, n) {
  const nLow = n | 0;
  let high = (upperProduct(nLow, 0x7f4a7c15) + Math.imul(nLow, 0x9e3779b9)) | 0;
  if (n > 0xffffffff) high = (high + Math.imul(Math.floor(n / 4294967296), 0x7f4a7c15)) | 0;
  const product = Math.imul(nLow, 0x7f4a7c15);
  let low = (product + keyLow) | 0;
  high = (high + keyHigh + (low >>> 0 < product >>> 0 ? 1 : 0)) | 0; // the sum wrapped around: carry
  low ^= (low >>> 30) | (high << 2);
  high ^= high >>> 30;
  high = (upperProduct(low, 0x1ce4e5b9) + Math.imul(high, 0x1ce4e5b9) + Math.imul(low, 0xbf58476d)) | 0;
  low = Math.imul(low, 0x1ce4e5b9);
  low ^= (low >>> 27) | (high << 5);
  high ^= high >>> 27;
  high = (upperProduct(low, 0x133111eb) + Math.imul(high, 0x133111eb) + Math.imul(low, 0x94d049bb)) | 0;
  low = Math.imul(low, 0x133111eb);
  last[0] = high ^ (high >>> 31);
  last[1] = low ^ ((low >>> 31) | (high << 1));
}

/**
 * The same as a word of its own.
 * @param {Word} key @param {number} n
 * @returns {Word}
 */
export function hashWord(key, n) {
  hash(key.high, key.low, n);
  return { high: last[0], low: last[1] };
}

/**
 * Step 2: the key of one of a site's streams.
 * @param {{seed: number | bigint, replicate: number}} keys @param {number} site @param {number} purpose
 * @returns {Word}
 */
export function stream(keys, site, purpose) {
  const seed = BigInt.asUintN(64, BigInt(keys.seed));
  let key = { high: Number(seed >> 32n), low: Number(seed & 0xffffffffn) };
  for (const coordinate of [keys.replicate, site, purpose]) key = hashWord(key, coordinate + 1);
  return key;
}

/**
 * Step 3: the 32-bit words of one row's units, two from each hash.
 * @param {Word} key @param {number} row @param {Uint32Array} words filled, a word for each unit
 * @param {number} flip a constant that each word is xored with
 */
function fillHalves(key, row, words, flip) {
  const units = words.length;
  const perRow = (units + 1) >>> 1;
  for (let pair = 0; pair < perRow; pair += 1) {
    hash(key.high, key.low, row * perRow + pair);
    words[2 * pair] = last[1] ^ flip;
    if (2 * pair + 1 < units) words[2 * pair + 1] = last[0] ^ flip;
  }
}

/**
 * Step 5: the ranks of one permutation of `nDraws` points.
 * @param {number} permutation @param {number} nDraws
 * @returns {Uint32Array}
 */
export function rank(permutation, nDraws) {
  const [highs, lows] = [new Int32Array(nDraws), new Uint32Array(nDraws)];
  for (let j = 0; j < nDraws; j += 1) {
    hash(PERMUTATION_KEY.high, PERMUTATION_KEY.low, permutation * nDraws + j);
    highs[j] = last[0];
    lows[j] = last[1];
  }
  return Uint32Array.from(highs.keys()).sort((a, b) => highs[a] - highs[b] || lows[a] - lows[b]);
}

/** @type {Map<string, Uint32Array>} */
const remembered = new Map();

/**
 * The points of one permutation as 32-bit words; made once.
 * @param {number} permutation @param {number} nDraws
 */
function points(permutation, nDraws) {
  const name = `${permutation} of ${nDraws}`;
  let lattice = remembered.get(name);
  if (lattice === undefined) {
    if (remembered.size > 4096) remembered.clear();
    // rank * 2^32 stays below 2^53 for up to two million draws.
    lattice = rank(permutation, nDraws).map((index) => Math.floor((index * 4294967296) / nDraws));
    remembered.set(name, lattice);
  }
  return lattice;
}

/**
 * Step 5: the lattice of a unit and where it begins in it; the point of draw t is `lattice[(start + t) % T]`.
 * @param {number} high the upper half of the unit's word @param {number} nDraws
 */
function unitLattice(high, nDraws) {
  const permutations = Math.max(1, Math.min(MOST_PERMUTATIONS, Math.floor(TABLE_ENTRIES / nDraws)));
  return { lattice: points((high & 0xffff) % permutations, nDraws), start: (high >>> 16) % nDraws };
}

/**
 * Step 5: the draw at which a row with masks of its own begins.
 * @param {Keys} keys @param {number} row
 */
function turn(keys, row) {
  return hashWord(stream(keys, -1, TURN), row).high % keys.nDraws;
}

/**
 * Steps 4 and 5: the words of one mask.
 * @param {Keys} keys @param {number} site @param {number} draw
 * @param {number | null} row null where all rows share the mask
 * @param {number} units
 * @returns {Uint32Array}
 */
export function words(keys, site, draw, row, units) {
  const result = new Uint32Array(units);
  if (keys.sampler === "independent") {
    fillHalves(hashWord(stream(keys, site, DRAW), draw), row ?? 0, result, 0x80000000);
    return result;
  }
  const key = stream(keys, site, UNIT);
  if (row !== null) fillHalves(stream(keys, site, ROW), row, result, 0);
  const turned = draw + (row === null ? 0 : turn(keys, row));
  for (let unit = 0; unit < units; unit += 1) {
    const { high, low } = hashWord(key, unit);
    const { lattice, start } = unitLattice(high, keys.nDraws);
    result[unit] = lattice[(start + turned) % keys.nDraws] + (row === null ? low : result[unit]);
  }
  return result;
}

/**
 * Step 6: the least word that is kept.
 * @param {number} dropProb
 */
export function threshold(dropProb) {
  const exact = dropProb * 4294967296;
  const below = Math.floor(exact);
  const rest = exact - below;
  const up = rest > 0.5 || (rest === 0.5 && below % 2 === 1); // halves go to the even neighbour
  return Math.min(up ? below + 1 : below, 4294967295);
}

/**
 * One mask, 1 where a unit is kept.
 * @param {Keys} keys @param {number} site @param {number} draw @param {number | null} row @param {number} units
 * @param {number} dropProb
 * @returns {Uint8Array}
 */
export function keepMask(keys, site, draw, row, units, dropProb) {
  const least = threshold(dropProb);
  return Uint8Array.from(words(keys, site, draw, row, units), (word) => (word >= least ? 1 : 0));
}

/**
 * The masks of all draws of the stratified sampler, shared by all rows, `[draw, unit]`: one hash for each unit.
 * @param {Keys} keys @param {number} site @param {number} units @param {number} dropProb
 * @returns {Uint8Array}
 */
export function sharedMasks(keys, site, units, dropProb) {
  const { nDraws } = keys;
  const key = stream(keys, site, UNIT);
  const least = threshold(dropProb);
  const result = new Uint8Array(nDraws * units);
  for (let unit = 0; unit < units; unit += 1) {
    const { high, low } = hashWord(key, unit);
    const { lattice, start } = unitLattice(high, nDraws);
    for (let draw = 0; draw < nDraws; draw += 1) {
      const word = (lattice[(start + draw) % nDraws] + low) >>> 0;
      result[draw * units + unit] = word >= least ? 1 : 0;
    }
  }
  return result;
}

/**
 * A stream of uniforms in (0, 1): the independent words of one site, one after another.
 * @param {number} seed @param {number} site
 * @returns {() => number}
 */
export function uniforms(seed, site) {
  const key = stream({ seed, replicate: 0 }, site, DRAW);
  let n = 0;
  return () => {
    hash(key.high, key.low, n);
    n += 1;
    return (last[0] + 0.5) / 4294967296;
  };
}

/**
 * The masks of many rows that each have their own, `[row, unit]`, scaled: 1 / (1 - dropProb) where kept, else 0.
 * @param {Keys} keys of the independent sampler @param {number} site @param {number} draw
 * @param {number} dropProb @param {number} rows @param {number} units @param {Float32Array} result
 */
export function fillRowMasks(keys, site, draw, dropProb, rows, units, result) {
  const key = hashWord(stream(keys, site, DRAW), draw);
  const least = threshold(dropProb);
  const scale = 1 / (1 - dropProb);
  const row = new Uint32Array(units);
  for (let r = 0; r < rows; r += 1) {
    fillHalves(key, r, row, 0x80000000);
    for (let unit = 0; unit < units; unit += 1) result[r * units + unit] = row[unit] >= least ? scale : 0;
  }
}
